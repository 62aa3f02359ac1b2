"""Files that another process is writing: read as far as they are whole, and never outside of the watched folder."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsl_sage.reading import LARGEST_JSON

CHUNK = 2**22
"""Bytes that one look reads of a file at most; the next look goes on."""
LONGEST = 2**20
"""Bytes of a line; a longer one is damaged."""


def open_regular(path: Path) -> int:
    """A descriptor of an ordinary file, for reading. An OSError for all else: a link could lead out of the folder."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would block
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


def small_text(path: Path, most: int = LARGEST_JSON) -> str | None:
    """The beginning of a file as text; None where there is none to be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return None


def small_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none, or it is damaged."""
    text = small_text(path)
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Growing:
    """The whole lines of a file that grows, each given out once. A file that was replaced is read anew."""

    def __init__(self, path: Path, on_line: Callable[[str], None], on_new: Callable[[], None]) -> None:
        """`on_line` is told of every whole line, and raises a ValueError if it is damaged; `on_new` of a new file."""
        self.path = path
        self.damaged = 0
        self.changed = 0.0
        """When the file was written last, in seconds since 1970; 0 while there is none."""
        self._on_line, self._on_new = on_line, on_new
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""

    def look(self) -> bool:
        """Read what is new; returns whether there was anything. A half-written last line waits for its end."""
        try:
            descriptor = open_regular(self.path)
        except OSError:
            if self._file is not None:
                self._begin(None)
            return False
        with os.fdopen(descriptor, "rb") as file:
            known = os.fstat(descriptor)
            if self._file != (known.st_dev, known.st_ino) or known.st_size < self._offset:
                self._begin((known.st_dev, known.st_ino))
            self.changed = known.st_mtime
            file.seek(self._offset)
            read = file.read(CHUNK)
        self._offset += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        if len(self._rest) > LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line)
        return bool(read)

    def _begin(self, file: tuple[int, int] | None) -> None:
        self._file, self._offset, self._rest = file, 0, b""
        self.damaged, self.changed = 0, 0.0
        self._on_new()

    def _take(self, line: bytes) -> None:
        try:
            if len(line) > LONGEST:
                raise ValueError("too long")
            self._on_line(line.decode())
        except (ValueError, RecursionError):
            self.damaged += 1

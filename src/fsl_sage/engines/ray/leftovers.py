"""Ray's helper processes that outlive a killed driver: written down when they start, and ended by the next run.

Ray ends most of what it has started when the driver dies, but agents of its cluster may stay. A process is known by its
id and by when it was started, which no other process ever has together: so nobody else's is ended, and none of a driver
that still lives.
"""

import json
import os
import re
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PROCESSES = Path("/proc")
_LIST = re.compile(r"[0-9]+-[0-9]+\.json")
"""The name of a list: the identity of the driver that wrote it."""


@contextmanager
def remembered() -> Iterator[None]:
    """Write down which processes are started meanwhile, by this one or by those that it starts."""
    before = _descendants()
    yield
    with suppress(OSError):
        folder = _folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(folder):
            me = _identity(os.getpid())
            (folder / f"{me}.json").write_text(json.dumps(sorted(_descendants() - before)))


def end_leftovers() -> list[str]:
    """End the helpers of drivers that are gone; returns who was ended. Does nothing where there is no /proc."""
    with suppress(OSError):
        if _is_ours(_folder()):
            lists = [file for file in _folder().iterdir() if _LIST.fullmatch(file.name)]
            gone = [file for file in lists if not _lives(file.stem)]
            return [helper for file in gone for helper in _end_all(file)]
    return []


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"fsl-sage-ray-{os.getuid()}"


def _is_ours(folder: Path) -> bool:
    """Whether `remembered` made the folder. In a place that all may write to, others put folders and links too."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def _end_all(file: Path) -> list[str]:
    try:
        helpers = [str(helper) for helper in json.loads(file.read_text())]
        file.unlink()
    except (OSError, ValueError, TypeError):
        return []
    return [helper for helper in helpers if _lives(helper) and _end(int(helper.split("-")[0]))]


def _lives(who: str) -> bool:
    number = who.split("-")[0]
    return number.isascii() and number.isdecimal() and _identity(int(number)) == who


def _end(process: int) -> bool:
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
        return True
    return False


def _identity(process: int) -> str | None:
    """A process's id and when it was started; None if it has ended."""
    fields = _status(process)
    return f"{process}-{fields[19]}" if fields and fields[0] != "Z" else None


def _status(process: int) -> list[str]:
    """The fields of /proc/ID/stat after the name, which may hold anything, also blanks and brackets."""
    try:
        return (_PROCESSES / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _descendants() -> set[str]:
    """The processes that this one has started, and those that they have."""
    parents = {int(path.name): _status(int(path.name)) for path in _PROCESSES.glob("[0-9]*")}
    found = {os.getpid()}
    while more := {id for id, fields in parents.items() if fields and int(fields[1]) in found} - found:
        found |= more
    return {who for id in found - {os.getpid()} if (who := _identity(id))}

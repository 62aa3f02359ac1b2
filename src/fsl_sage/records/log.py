"""A file of lines that only grows, and what a checkpoint remembers of it."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsl_sage.errors import InputError
from fsl_sage.records.files import write_bytes


class Log:
    """Whole lines. A seal tells how many there are, how many bytes they have, and their SHA-256."""

    def __init__(self, path: Path, header: str = "") -> None:
        self.path = path
        self._header = header.encode()
        self._lines = self._bytes = 0
        self._hash = hashlib.sha256()

    def append(self, text: str) -> None:
        """Add whole lines."""
        # One write, so that a reader sees whole lines; what a kill tears, `cut_back` removes.
        try:
            with open(self.path, "ab") as file:
                file.write(text.encode())
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise
        self._count(text.encode())

    def seal(self) -> dict[str, Any]:
        """What a checkpoint is to remember of the lines so far, which are on the disk when this returns."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        return {"lines": self._lines, "bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def check(self, seal: Mapping[str, Any]) -> bytes:
        """The lines that a checkpoint has sealed; refused if they are not as they were."""
        try:
            with open(self.path, "rb") as file:
                kept = file.read(int(seal["bytes"]))
        except OSError as error:
            raise self._refusal(seal, f"it cannot be read ({error.strerror})") from None
        if len(kept) < seal["bytes"]:
            raise self._refusal(seal, f"only {len(kept):,} of their {seal['bytes']:,} bytes are left")
        if hashlib.sha256(kept).hexdigest() != seal["sha256"]:
            raise self._refusal(seal, "they are not what was written")
        return kept

    def cut_back(self, seal: Mapping[str, Any] | None) -> None:
        """Keep the lines that a checkpoint has sealed, or none, and forget the rest."""
        kept = self._header if seal is None else self.check(seal)
        write_bytes(self.path, kept)
        self._lines = self._bytes = 0
        self._hash = hashlib.sha256()
        self._count(kept)

    def _count(self, text: bytes) -> None:
        self._lines += text.count(b"\n")
        self._bytes += len(text)
        self._hash.update(text)

    def _refusal(self, seal: Mapping[str, Any], reason: str) -> InputError:
        return InputError(
            f"{self.path} does not fit the checkpoint, which belongs to its first {seal['lines']:,} lines: {reason}. "
            "Put the file back as it was, or start a new run with another --out."
        )

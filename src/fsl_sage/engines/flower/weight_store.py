"""Large tensors on the disk of a node. The name of a file is the SHA-256 of the tensor's bytes.

A tensor arrives in chunks, in any order. Chunks survive a restart of the node. When all have arrived, the tensor is put
together and checked. Runs with the same frozen weights share the files.

This module imports neither torch nor most of the package, so that a process that stores a chunk starts fast.
"""

import hashlib
import os
import re
from pathlib import Path

from fsl_sage.errors import InputError

WEIGHTS = "weights"
"""The name of the message that brings chunks to a node, and of the directory that keeps them."""
CHUNK = 2**25
"""Bytes of a chunk; the last one of a tensor may be shorter."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"([0-9a-f]{64})(?:\.[0-9]+)?(?:\.part-([0-9]+))?")
"""The name of a chunk, or of a file that is being written, with the process that writes it."""


class WeightStore:
    """A directory of tensors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, sha256: str) -> Path:
        """Where a tensor is, once it is complete."""
        if not _SHA256.fullmatch(sha256):  # the name came over the network, and becomes the name of a file
            raise InputError("The name of a weight is not a SHA-256.")
        return self.directory / sha256

    def drop_if_damaged(self, sha256: str) -> None:
        """Look whether a tensor that is here still has its SHA-256; else it is dropped, to come again."""
        path = self.path(sha256)
        if not path.exists():
            return
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return
        path.unlink(missing_ok=True)

    def drop_unfinished(self) -> None:
        """Delete what killed processes have left: files that they were writing, and chunks of complete tensors."""
        for path in self.directory.glob("*.*"):
            if (name := _UNFINISHED.fullmatch(path.name)) is None:
                continue
            sha256, process = name.groups()
            if _is_gone(int(process)) if process else self.path(sha256).exists():
                path.unlink(missing_ok=True)

    def lacks(self, sha256: str, size: int) -> list[int]:
        """The numbers of the missing chunks of a tensor of `size` bytes."""
        if self.path(sha256).exists():
            return []
        return [number for number in range(chunks_of(size)) if not self._chunk(sha256, number).exists()]

    def put(self, sha256: str, size: int, number: int, content: bytes) -> None:
        """Keep a chunk. When it is the last, the tensor is put together.

        Args:
            sha256: That of the tensor.
            size: Bytes of the tensor.
            number: The place of the chunk in the tensor, from 0.
            content: The chunk's bytes.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(self._chunk(sha256, number), content)
            if not self.path(sha256).exists() and not self.lacks(sha256, size):
                self._complete(sha256, size)
        except OSError as error:
            if self.path(sha256).exists():  # another client of this node was faster
                return
            raise InputError(f"A weight cannot be written at this node: {error.strerror}.") from None

    def _complete(self, sha256: str, size: int) -> None:
        """Put the chunks together, one at a time. If the SHA-256 is wrong, all are deleted and have to come again."""
        chunks = [self._chunk(sha256, number) for number in range(chunks_of(size))]
        whole, written = hashlib.sha256(), self.path(sha256).with_name(f"{sha256}.part-{os.getpid()}")
        with open(written, "wb") as file:
            for chunk in chunks:
                content = chunk.read_bytes()
                whole.update(content)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if whole.hexdigest() == sha256:
            os.replace(written, self.path(sha256))
        for path in (written, *chunks):
            path.unlink(missing_ok=True)

    def _chunk(self, sha256: str, number: int) -> Path:
        return self.path(sha256).with_name(f"{sha256}.{number}")


def chunks_of(size: int) -> int:
    """The number of chunks of a tensor of `size` bytes."""
    return -(-size // CHUNK)


def _is_gone(process: int) -> bool:
    """Whether a process of this machine has ended; False where that cannot be asked."""
    if os.name != "posix":
        return False
    try:
        os.kill(process, 0)  # signal 0 only asks
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it is another user's
        pass
    return False


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.part-{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)

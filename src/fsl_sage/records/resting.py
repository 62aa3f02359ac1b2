"""Memory for what clients hold while others take their steps: in files, where all of it together is too much.

Clients that wait for the S-server take turns. Between its steps each has weights and what its optimizers remember. Up
to a limit of all clients together that stays where it is. What comes beyond it moves into mapped files, once in a
round, and is trained there: the system writes pages to the disk when it needs their memory, and reads them when they
are used. The files have no names, so nothing is left of them when the round or the process has ended.
"""

import os
import secrets
import shlex
import threading
from pathlib import Path

import torch
from torch import Tensor

from fsl_sage.errors import TrainingError
from fsl_sage.records.files import PART


class RestingPlace:
    """Gives memory for the clients of one round. Threads may ask side by side."""

    def __init__(self, directory: Path | None, limit: int) -> None:
        """Start a round.

        Args:
            directory: Where files may be; without one all stays in memory.
            limit: How many bytes may stay in memory.
        """
        self._directory = directory
        self._limit = limit
        self._lock = threading.Lock()
        self._held = self._files = 0
        self._run = secrets.token_hex(4)
        """In no other process's names: threads of an interrupted run may still be at work on this directory."""

    @classmethod
    def in_memory(cls) -> "RestingPlace":
        """A place where all stays as it is."""
        return cls(None, 0)

    def __call__(self, size: int) -> Tensor | None:
        """So many bytes of a file, uint8 [size], which begin with a page; None if they may stay in memory."""
        with self._lock:
            self._held += size
            if self._directory is None or self._held <= self._limit:
                return None
            self._files += 1
            path = self._directory / f"waiting-{self._run}-{self._files}{PART}"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                if hasattr(os, "posix_fallocate"):  # a full disk is told here, and not by a signal later
                    os.posix_fallocate(file.fileno(), 0, size)
            return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        except OSError as error:
            raise TrainingError(
                f"{path} cannot be written: {error.strerror or error}. The last checkpoint is kept: fix that, then "
                f"continue with 'fsl-sage resume {shlex.quote(str(path.parent.parent))}'."
            ) from None
        finally:
            path.unlink(missing_ok=True)  # its pages stay until nobody uses them

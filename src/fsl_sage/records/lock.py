"""Only one process may play a run: it holds a lock on the directory, which the system releases when it ends."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from fsl_sage.errors import InputError


class LockedError(InputError):
    """Another process has the run."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; a LockedError says who has it, if another does. Where there are no locks: nothing."""
    file = _take(path)
    try:
        yield
    finally:
        if _is_at(file, path):  # else it is another's
            path.unlink()  # while it is still held, so that nobody takes a lock that has no name any more
        file.close()


def is_foreign(path: Path) -> bool:
    """Whether a file at `path` is no lock: somebody else has written it."""
    try:
        content = path.read_text()
    except ValueError:  # it is no text
        return True
    except OSError:  # there is none, or it is for `held` to say why it cannot be read
        return False
    return bool(content) and _signature(content) is None


def _take(path: Path) -> IO[str]:
    while True:
        file = open(path, "a+")  # noqa: SIM115
        try:
            _lock(file, path)
        except BaseException:
            file.close()
            raise
        if _is_at(file, path):
            _sign(file)
            return file
        file.close()  # its holder took it away between the opening and the lock


def _lock(file: IO[str], path: Path) -> None:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # this system has no such locks
        pass
    except BlockingIOError:
        raise LockedError(
            f"{path.parent} is being played by {_holder(file)}: wait until it ends, or stop it and try again."
        ) from None
    except OSError:  # this file system has none
        pass


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(file: IO[str]) -> None:
    """Write down which process holds the lock, for the error of a second one."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    file.truncate(0)
    file.write(json.dumps({"process": os.getpid(), "machine": socket.gethostname(), "since": now}))
    file.flush()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        return _signature(file.read()) or "another process"
    except ValueError:
        return "another process"


def _signature(content: str) -> str | None:
    """Who has signed a lock, in words; None where nobody has."""
    try:
        who: dict[str, Any] = json.loads(content)
        return f"process {who['process']} on {who['machine']} since {who['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return None

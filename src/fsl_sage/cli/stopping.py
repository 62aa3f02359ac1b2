"""Ending a command from outside: an interrupt from the keyboard, or a SIGTERM by whoever runs it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: as with an interrupt, whoever cleans up after one does it now."""


@contextmanager
def stops() -> Iterator[None]:
    """Let SIGTERM raise Terminated, so that a command that is ended can say how to go on."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only there can it be done
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: Any) -> None:
    raise Terminated


def exit_code(stop: BaseException) -> int:
    """As a shell reports the signal."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)

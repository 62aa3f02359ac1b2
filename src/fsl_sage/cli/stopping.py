"""Ending a command from outside: an interrupt from the keyboard, or a SIGTERM by whoever runs it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsl_sage.cli.consoles import ERRORS


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: as with an interrupt, whoever cleans up after one does it now."""


@contextmanager
def stops() -> Iterator[None]:
    """Acknowledge an interrupt at once, and let SIGTERM raise Terminated, so that a command can say how to go on."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only there can it be done
        return
    before = {number: signal.signal(number, _raise) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: Any) -> None:
    """Say at once that the signal has come: what is being computed may take a while to let go."""
    ERRORS.print("\nStopping …", highlight=False)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def exit_code(stop: BaseException) -> int:
    """As a shell reports the signal."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)

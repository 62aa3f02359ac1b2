"""What a run is doing at this moment, for whoever watches it. It decides no number and is not recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]
"""Told in a few words, perhaps from another thread."""

_listeners: list[Listener] = []


def now(doing: str) -> None:
    """Tell the listener, for example `now("aligning, step 40 of 160")`."""
    for listener in tuple(_listeners):
        listener(doing)


@contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Within this context `listener` is told."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)

"""When a checkpoint is written: every N rounds, or after every round that is long enough for it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.05
"""The part of a run's time that checkpoints take at most, if it is not said how often they are written."""


class Checkpoints:
    """Tells after which rounds a checkpoint is due.

    Without a number of rounds one is due when the last one has taken at most SHARE of the time up to now since it was
    begun. So long rounds have one each, and of many short ones a kill loses twenty times a checkpoint's time at most.
    """

    def __init__(self, every: int | None, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without a checkpoint.

        Args:
            every: The number of rounds between two checkpoints, if it is given.
            clock: Tells the seconds.
        """
        self._every = every
        self._clock = clock
        self._began = self._took = 0.0
        self.rounds = 0
        """How many rounds the last checkpoint has."""

    def due(self, rounds: int) -> bool:
        """Whether one is due after so many rounds."""
        if self._every is not None:
            return rounds % self._every == 0
        return self.rounds == 0 or self._took <= SHARE * (self._clock() - self._began)

    @contextmanager
    def writing(self, rounds: int) -> Iterator[None]:
        """While a checkpoint of so many rounds is written."""
        self._began = self._clock()
        yield
        self._took = self._clock() - self._began
        self.rounds = rounds

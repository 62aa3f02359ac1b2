"""Timing two sides in turn, so that a busy machine is unfair to neither."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

CONSOLE = Console(highlight=False)


@dataclass(frozen=True)
class Ratio:
    """Seconds of side A over seconds of side B, repeat by repeat."""

    a: list[float]
    b: list[float]

    @property
    def values(self) -> list[float]:
        """One ratio a repeat."""
        return [x / y for x, y in zip(self.a, self.b, strict=True)]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        values = self.values
        seconds = f"{statistics.median(self.a):.2f} s / {statistics.median(self.b):.2f} s"
        return f"{self.median:.2f} ({min(values):.2f} to {max(values):.2f} over {len(values)} repeats; {seconds})"


def compare(
    a: Callable[[], object],
    b: Callable[[], object],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """Time `a` and `b` in turn, after one call of each to warm up."""
    a(), b()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, place in ((a, 0), (b, 1)):
            start = clock()
            side()
            times[place].append(clock() - start)
    return Ratio(*times)


def compare_cpu(a: Callable[[], object], b: Callable[[], object], repeats: int = 5) -> Ratio:
    """As `compare`, by the processor time that this process takes."""
    return compare(a, b, repeats, time.process_time)

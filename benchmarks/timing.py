"""Timing two sides in turn, so that a busy machine is unfair to neither; and the table that `make bench` ends with."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

CONSOLE = Console(highlight=False)
RECORD = Path(__file__).parent / "results" / "last.md"


class Goal(NamedTuple):
    """What a figure should be."""

    limit: float
    at_most: bool = True

    def is_met(self, value: float) -> bool:
        """Whether a figure is as good as it should be."""
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}"


def at_least(limit: float) -> Goal:
    """A goal that larger figures meet."""
    return Goal(limit, at_most=False)


class Line(NamedTuple):
    """A figure of the table, with its goal if it has one."""

    what: str
    value: float
    goal: Goal | None

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        return "" if self.goal is None else "met" if self.goal.is_met(self.value) else "not met"


LINES: list[Line] = []


def note(what: str, value: float, goal: Goal | None = None) -> None:
    """Put a figure into the table."""
    LINES.append(Line(what, value, goal))


def summary(seconds: float) -> None:
    """Print the table of all figures that were noted, and write it down with the machine and the time it took."""
    table = Table("ratio", "measured", "goal", "", title="All ratios of this run")
    for line in LINES:
        table.add_row(line.what, f"{line.value:.2f}", str(line.goal or ""), line.verdict)
    CONSOLE.print(table)
    RECORD.parent.mkdir(exist_ok=True)
    rows = "".join(f"| {each.what} | {each.value:.2f} | {each.goal or ''} | {each.verdict} |\n" for each in LINES)
    RECORD.write_text(
        f"# Ratios\n\nPrinted by `make bench` on {date.today()} in {seconds / 60:.0f} minutes: {_machine()}.\n\n"
        f"| ratio | measured | goal | |\n|---|---:|---|---|\n{rows}"
    )
    CONSOLE.print(f"The table is in {RECORD.relative_to(Path(__file__).parents[1])}.")


def _machine() -> str:
    names = (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name"))
    processor = f"{next(names, platform.processor())} ({torch.backends.cpu.get_cpu_capability()})"
    return f"{processor}, torch {torch.__version__}, Python {platform.python_version()}"


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


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
    warm: bool = False,
) -> Ratio:
    """Time `a` and `b` in turn; after one call of each to warm up, if they are not `warm`."""
    if not warm:
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

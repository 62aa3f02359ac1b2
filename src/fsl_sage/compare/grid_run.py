"""A run of a grid: what is planned, where its files are, and how far it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fsl_sage.compare.grid import Plan
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.records.activity_file import read_activity
from fsl_sage.records.run_directory import RunDirectory

State = Literal["waiting", "running", "finished", "failed"]


@dataclass
class GridRun:
    """A run of the grid and how far it is."""

    plan: Plan
    directory: RunDirectory
    state: State = "waiting"
    last: dict[str, Any] | None = None
    """The metrics of its newest round."""
    score: Score = ACCURACY
    """What it is judged by."""
    best_score: float | None = None
    error: str = ""
    _read: int = 0

    def look(self) -> bool:
        """Read what the run has written since the last look; returns whether there was anything."""
        file = self.directory.metrics_file
        if not file.exists() or file.stat().st_size == self._read:
            return False
        self._read = file.stat().st_size
        metrics = self.directory.metrics()
        if metrics:
            self.last = metrics[-1]
            self.score = self.directory.score()
            scores = [line[self.score.name] for line in metrics if line.get(self.score.name) is not None]
            self.best_score = self.score.best(scores) if scores else None
        return True

    def doing(self) -> str:
        """What it is doing now, in a few words; empty where that is not known."""
        return str(read_activity(self.directory.path).get("doing", "")) if self.state == "running" else ""


class Running(Protocol):
    """The process of a run that has been started, on this machine or on another."""

    returncode: int | Any

    def poll(self) -> int | None:
        """The exit code, once the process has ended."""

    def communicate(self) -> Any:
        """Wait until the process has ended."""

    def terminate(self) -> None:
        """Stop the process; the run's last checkpoint stays."""


Start = Callable[[GridRun, int], Running]
"""Starts a run whose directory holds its configuration; the number is that of its workers."""


class Watcher:
    """Told how a comparison proceeds; the command line derives its display from it."""

    def start(self, runs: Sequence[GridRun]) -> None:
        """The comparison starts; some of its runs may be finished already."""

    def changed(self, run: GridRun) -> None:
        """A run has started or ended."""

    def moved(self, run: GridRun) -> None:
        """A run has finished a round."""

    def stop(self) -> None:
        """The comparison ends, for whatever reason."""

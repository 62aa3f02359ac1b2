"""A run of a comparison as the one who started it sees it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.grid import Plan

State = Literal["waiting", "running", "finished", "failed"]


@dataclass
class Job:
    """A run of the grid and how far it is."""

    plan: Plan
    directory: RunDirectory
    state: State = "waiting"
    last: dict[str, Any] | None = None
    """The metrics of its newest round."""
    best_accuracy: float | None = None
    error: str = ""
    _read: int = 0

    def look(self) -> bool:
        """Read what the run has written since; whether there was anything."""
        file = self.directory.metrics_file
        if not file.exists() or file.stat().st_size == self._read:
            return False
        self._read = file.stat().st_size
        metrics = self.directory.metrics()
        if metrics:
            self.last = metrics[-1]
            accuracies = [line["test_accuracy"] for line in metrics if line.get("test_accuracy") is not None]
            self.best_accuracy = max(accuracies, default=None)
        return True


class Running(Protocol):
    """A run that has been started: a process, here or elsewhere."""

    returncode: int | Any

    def poll(self) -> int | None:
        """The exit code once it has ended."""

    def communicate(self) -> Any:
        """Let it end."""

    def terminate(self) -> None:
        """Stop it; its last checkpoint stays."""


Start = Callable[[Job, int], Running]
"""Starts a run, whose directory holds its configuration, with so many workers."""

"""A run's progress as plain lines of text: for logs, files and pipes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsl_sage.config import Config
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.subject import clients_text
from fsl_sage.records.trackers import Tracker
from fsl_sage.units import gib_number
from fsl_sage.wire.ledger import GIB


def print_line(line: str) -> None:
    """Print a line at once: who reads a log wants to see the newest round."""
    print(line, flush=True)


SILENCE = 30.0
"""Seconds after which a line says what is going on."""


class PlainLines(Tracker):
    """What runs and where its files are, then one line a round."""

    def __init__(self, write: Callable[[str], None] = print_line, clock: Callable[[], float] = time.monotonic) -> None:
        self._print = write
        self._clock = clock
        self._said = clock()
        self._rounds = 0
        self._score = ACCURACY

    def _write(self, line: str) -> None:
        self._said = self._clock()
        self._print(line)

    def activity(self, doing: str) -> None:
        """Break a long silence."""
        if self._clock() - self._said >= SILENCE:
            self._write(f"  {doing}")

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """Say what runs."""
        self._rounds = config.rounds
        self._score = RunDirectory(directory).score()
        self._write(f"{config.algorithm} · {describe(config, len(done))}")
        self._write(f"files in {directory}")

    def round(self, metrics: dict[str, Any]) -> None:
        """One line."""
        names = (self._score.short, "loss", "GiB", "fidelity", "time")
        values = "  ".join(
            f"{name} {value}" for name, value in zip(names, round_cells(metrics, self._score), strict=True)
        )
        self._write(f"round {metrics['round'] + 1}/{self._rounds}  {values}")


def describe(config: Config, done: int) -> str:
    """What runs beside the algorithm: the model, the data, the clients; `done` rounds were there before."""
    again = f", going on after {done} round{'' if done == 1 else 's'}" if done else ""
    return (
        f"{config.model.name} on {config.data.name} ({config.data.partition}) · "
        f"{clients_text(config.clients)}, batch {config.batch_size} · "
        f"{'1 round' if config.rounds == 1 else f'up to {config.rounds} rounds'}{again}"
    )


def round_cells(metrics: dict[str, Any], score: Score) -> list[str]:
    """A round for people: the headline score, loss, GiB moved so far, fidelity (before → after an alignment), time."""
    before, after = metrics["fidelity_cosine"], metrics["fidelity_cosine_seen"]
    fidelity = "-" if before is None else f"{before:.2f}" + ("" if after is None else f" → {after:.2f}")
    return [
        score.text(metrics[score.name]),
        "-" if (loss := metrics.get("test_loss")) is None else f"{loss:.3f}",
        gib_number(metrics["bytes_paper"] / GIB),
        fidelity,
        f"{metrics['seconds']:.1f} s",
    ]

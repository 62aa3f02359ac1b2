"""Reads run directories: raw metrics, and nothing that a run has not written down."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsl_sage.errors import InputError, sentence
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.reading import read_json
from fsl_sage.records.config_file import score_in
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.options import written_options
from fsl_sage.wire.ledger import GIB
from fsl_sage.wire.message import AUXILIARY

_NEEDED = ("bytes_paper", "bytes_total", "seconds", "elapsed_seconds")
"""What every run has recorded of every round, besides its score."""
_BEYOND = 1e150
"""The squares of smaller numbers are finite."""


@dataclass(frozen=True)
class Run:
    """A run, read from its directory."""

    name: str
    """The directory, relative to the folder of the report."""
    options: Mapping[str, Any]
    """The configuration by path, as it was written down: a report must read runs of other versions too."""
    metrics: list[dict[str, Any]]
    stopped: str | None
    """Which stop rule ended it; None while it is unfinished."""
    busiest_bytes: np.ndarray
    """[rounds + 1] Bytes up and down of the client that moved most, everything counted; first the first download."""
    auxiliary_bytes: int | None
    """Size of the auxiliary as it travelled; None where it never did."""
    classes: tuple[np.ndarray, list[str]] | None
    """Training examples [clients, classes], and the classes' names."""
    environment: str
    """Versions and machine."""
    score: Score = ACCURACY
    """What it is judged by."""
    failure: str | None = None
    """Why it failed, if it did."""

    @property
    def algorithm(self) -> str:
        """Its name."""
        return str(self.options["algorithm"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.options["seed"])

    def values(self, name: str) -> np.ndarray:
        """[rounds] One metric; NaN where it does not apply, or is no number that can be drawn."""
        found = [line.get(name) for line in self.metrics]
        return np.array([value if _is_number(value) else np.nan for value in found], dtype=float)

    def once(self, name: str) -> int | None:
        """A metric that is recorded in one round; None where it was not."""
        found = self.values(name)
        return next((int(value) for value in found if not np.isnan(value)), None)

    @property
    def gib(self) -> np.ndarray:
        """[rounds] GiB moved so far, by the paper's convention."""
        return self.values("bytes_paper") / GIB

    @property
    def whole_gib(self) -> np.ndarray:
        """[rounds] The same, as if every model were sent whole, frozen weights too, as the paper counts adapters."""
        whole = self.values("bytes_whole_models") / GIB
        return np.where(np.isnan(whole), self.gib, whole)


def load_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """All runs under a folder that have finished a round, and a sentence on each that cannot be used."""
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}.")
    runs, notes = [], []
    for file in sorted(folder.rglob("config.json")):
        directory = RunDirectory(file.parent)
        name = str(file.parent.relative_to(folder)) if file.parent != folder else folder.resolve().name
        try:
            run = _load(name, directory)
        except InputError as error:
            notes.append(f"{name} is left out: {error}")
            continue
        except Exception as error:  # a run of somebody else can be damaged in ways that nobody has thought of
            notes.append(f"{name} is left out: its files are damaged ({type(error).__name__}).")
            continue
        if run.failure is not None:
            rest = f" It is shown up to round {len(run.metrics)}." if run.metrics else ""
            notes.append(f"{name} failed: {sentence(run.failure)}{rest}")
        if run.metrics:
            runs.append(run)
        elif run.failure is None:
            notes.append(f"{name} is left out: it has not finished a round yet.")
    if not runs:
        raise InputError(f"There is no run to report in {folder}." + "".join(f" {note}" for note in notes[:3]))
    return runs, notes


def _load(name: str, directory: RunDirectory) -> Run:
    options, environment, score = _configuration(directory)
    metrics = _readable(directory.metrics_file, directory.metrics)
    result = _readable(directory.result_file, directory.result)
    busiest, auxiliary = _from_ledger(directory, len(metrics))
    stopped = None if result is None else str(result["stopped"])
    classes = _readable(directory.classes_file, directory.classes)
    run = Run(name, options, metrics, stopped, busiest, auxiliary, classes, environment, score, directory.failure())
    for metric in (score.name, *_NEEDED):
        if np.isnan(run.values(metric)).any():
            raise InputError(f"its {metric} is not a number in every round.")
    return run


def _configuration(directory: RunDirectory) -> tuple[dict[str, Any], str, Score]:
    """The options, with today's defaults for those that were not there yet; versions and machine; the score."""
    written = _readable(directory.config_file, lambda: read_json(directory.config_file))
    if not isinstance(written, dict) or not isinstance(written.get("config"), dict):
        raise InputError("config.json is not a run's configuration.")
    versions = [f"{name} {number}" for name, number in dict(written.get("versions", {})).items()]
    environment = ", ".join([*versions, *map(str, dict(written.get("machine", {})).values())])
    return written_options(written["config"]), environment, score_in(written)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _BEYOND


def _readable(file: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (ValueError, StopIteration):
        raise InputError(f"{file.name} is damaged.") from None


def _from_ledger(directory: RunDirectory, rounds: int) -> tuple[np.ndarray, int | None]:
    """The busiest client's bytes by round, and the size of one auxiliary."""
    by_client: dict[tuple[int, int], int] = defaultdict(int)
    auxiliaries = []
    for entry in _readable(directory.ledger_file, directory.ledger):
        by_client[entry.round, entry.client] += entry.bytes
        if entry.kind == AUXILIARY:
            auxiliaries.append(entry.bytes)
    busiest = np.zeros(rounds + 1)
    for (t, _), amount in by_client.items():
        if -1 <= t < rounds:
            busiest[t + 1] = max(busiest[t + 1], amount)
    return busiest, min(auxiliaries, default=None)

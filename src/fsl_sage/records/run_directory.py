"""The run directory: the one place that writes a run's files.

config.json         everything that decides the run, with versions; written before anything slow. Then the headline
                    score is added: its name and its direction
metrics.jsonl       one object a round
ledger.csv          every byte by round, client, direction and kind; round -1 is the first download
checkpoint.safetensors   the newest checkpoint, between rounds; dropped when the run is finished
clients/            clients' states that are too large for memory, in files that the checkpoint names; dropped with it
model.safetensors   the final merged model; of one trained by LoRA what was trained, its adapters
best.safetensors    with --keep best: the merged model of the best round; best-newer.safetensors until a checkpoint has
                    that round
inference.json      what the model needs besides its weights: for images their normalisation and the classes
README.md           what the model is, and the lines that load it
adapter/            these adapters in peft's own format
failure.txt         why the run failed, until it is resumed
result.json         how the run ended; its presence says that the run is finished
classes.csv         the class-label distribution: training examples by client (rows) and class (columns)
test_by_class.csv   at the end: each class (rows) with the metrics of the last round that are by class (columns)
activity.json       what the run is doing now, and each of its workers; gone when it ends
accuracy.png        the headline score (under its name) against communication
classes.png
.lock               who plays the run; gone when it ends
"""

import csv
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fsl_sage.config import NO_PART_OF_THE_RESULT, Config, digest, from_dict, from_file, to_dict
from fsl_sage.errors import InputError, TrainingError, listed
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.reading import read_json
from fsl_sage.records.activity_file import ACTIVITY
from fsl_sage.records.class_tables import read_classes, write_by_class, write_classes
from fsl_sage.records.client_store import remove_states
from fsl_sage.records.config_file import leads_nowhere, read_config_file, score_in, versions, warn_of_versions
from fsl_sage.records.files import (
    LongHeaderError,
    as_csv,
    as_file_name,
    load_tensors,
    readable,
    save_tensors,
    write_bytes,
    write_json,
)
from fsl_sage.records.lock import LockedError, held, is_foreign
from fsl_sage.records.log import Log
from fsl_sage.wire.ledger import Entry
from fsl_sage.wire.message import Tensors

_SEAL = "sha256"
LOCK = ".lock"
LEDGER_HEADER = "round,client,direction,kind,bytes\n"


class RunDirectory:
    """A run's files."""

    def __init__(self, path: Path | str) -> None:
        if not isinstance(path, str | os.PathLike):
            raise InputError(f"A run's directory is given by its path, not by {path!r:.60}.")
        self.path = path = Path(path)
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.ledger_file = path / "ledger.csv"
        self.checkpoint_file = path / "checkpoint.safetensors"
        self.clients = path / "clients"
        self.model_file = path / "model.safetensors"
        self.best_file = path / "best.safetensors"
        self._newer_best = path / "best-newer.safetensors"
        self.inference_file = path / "inference.json"
        self.card_file = path / "README.md"
        self.failure_file = path / "failure.txt"
        self.adapter = path / "adapter"
        self.result_file = path / "result.json"
        self.classes_file = path / "classes.csv"
        self.by_class_file = path / "test_by_class.csv"
        self._lock = path / LOCK
        self._logs = {
            file.name: Log(file, header)
            for file, header in ((self.ledger_file, LEDGER_HEADER), (self.metrics_file, ""))
        }

        self._early = (
            *(self.metrics_file, self.ledger_file, self._newer_best, self.inference_file, self.failure_file),
            *(self.classes_file, path / "classes.png", path / ACTIVITY),
        )
        """What may be there before a run has finished its first round."""
        self._taken = (
            *(*self._early, self.checkpoint_file, self.clients, self.model_file, self.best_file, self.card_file),
            *(self.adapter, self.result_file, self.by_class_file),
        )
        """What a run writes over and takes away: none of it may be somebody else's. Nor may the figure of its score,
        whose name is known later, and the lock."""

        self._is_held = False

    @classmethod
    def at(cls, config: Config) -> "RunDirectory":
        """Where a configuration wants its run: --out, or a place of its own under runs."""
        return cls(config.out or _default_path(config))

    @classmethod
    def create(cls, config: Config) -> "RunDirectory":
        """A new run's directory, with its configuration."""
        directory = cls.at(config)
        with directory.held():
            directory.begin(config)
        return directory

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of this run; a LockedError says which other process has it, if one has.

        A directory that is empty when the lock is let go is taken away.
        """
        if self._is_held:
            yield
            return
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._check_lock()
                stack.callback(self._leave)
                stack.enter_context(held(self._lock))
            except FileExistsError:
                raise self._is_a_file() from None
            except OSError as error:
                raise InputError(f"{self.path} cannot be written: {error.strerror}.") from None
            self._is_held = True
            stack.callback(setattr, self, "_is_held", False)
            yield

    def _leave(self) -> None:
        with suppress(OSError):  # it is not empty
            self.path.rmdir()

    def _check_lock(self) -> None:
        if is_foreign(self._lock):
            raise InputError(
                f"{self._lock} is no lock of a run, and a run would write over that: give another --out, or move it "
                "away."
            )

    def is_played(self) -> bool:
        """Whether a process plays the run at this moment."""
        if is_foreign(self._lock):
            return False
        try:
            with held(self._lock):
                return False
        except LockedError:
            return True
        except OSError:  # the directory cannot be written, so nobody plays a run in it
            return False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say what to do if a file of the run cannot be written: the disk is full, or no longer to be written to."""
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"{error.filename or self.path} cannot be written: {error.strerror or error}. The last checkpoint is "
                f"kept: fix that, then continue with '{self.resuming}'."
            ) from None

    @property
    def resuming(self) -> str:
        """The command that resumes the run, to be copied."""
        return f"fsl-sage resume {shlex.quote(str(self.path))}"

    def begin(self, config: Config) -> None:
        """Write down the configuration of a new run."""
        if self.config_file.exists():
            going_on = ", which is finished:" if self.finished() else f": resume it with '{self.resuming}', or"
            raise InputError(f"{self.path} already holds a run{going_on} give another --out.")
        self.check_free()
        try:
            write_json(self.config_file, {"config": to_dict(config), "digest": digest(config), **versions()})
        except OSError as error:
            raise InputError(f"--out {self.path} cannot be written: {error.strerror}.") from None

    def check_free(self, score: Score | None = None) -> None:
        """Refuse a directory without a run that holds what a run would write over; with the score its figure too."""
        if self.path.exists() and not self.path.is_dir():
            raise self._is_a_file()
        self._check_lock()
        figures = () if score is None else (self.figure(score),)
        self._refuse([path.name for path in (*self._taken, *figures) if path.exists()])

    def _is_a_file(self) -> InputError:
        return InputError(f"--out {self.path} is a file: give a directory for the run.")

    def _refuse(self, others: Sequence[str]) -> None:
        if others:
            raise InputError(
                f"--out {self.path} holds {listed(others)} but no run, and a run would write over that: give another "
                "--out."
            )

    def take_over(self, config: Config) -> None:
        """Write down those options of a configuration that may change in a run: they are no part of its result."""
        written = read_config_file(self.config_file)
        given = to_dict(config)
        changed = {**written["config"], **{name: given[name] for name in NO_PART_OF_THE_RESULT if name != "workers"}}
        if changed != written["config"]:
            write_json(self.config_file, {**written, "config": changed})

    def config(self) -> Config:
        """The configuration of the run; what it holds of options of other algorithms is left out."""
        values = read_config_file(self.config_file)["config"]
        # An option that a later version has added is as it was before: of no effect.
        return from_file(from_dict(values, Config()), str(self.config_file), of_several=True)

    @contextmanager
    def from_its_folder(self) -> Iterator[None]:
        """Say that the run's paths are relative to where it was started, if they lead nowhere from here."""
        try:
            yield
        except InputError as error:
            config = self.config()
            lost = [name for name in (config.data.name, config.model.name, config.algorithm) if leads_nowhere(name)]
            if not lost:
                raise
            told = str(error).rstrip(".")
            raise InputError(
                f"{told}. {self.path} was started in another folder than this, and {lost[0]} is relative to that: "
                "go there."
            ) from None

    def warn_of_versions(self) -> None:
        """Warn if the run began with other software than is here now: the same command may give other bits."""
        warn_of_versions(self.config_file)

    def abandon(self) -> None:
        """Take away a run that could not even start; its directory too, if nothing else is in it."""
        with self.held():
            if self.metrics():
                return
            for path in self._early:
                path.unlink(missing_ok=True)
            remove_states(self.clients)
            self.config_file.unlink(missing_ok=True)  # last: what a kill leaves before is still a run, not a stray file

    def figure(self, score: Score) -> Path:
        """The figure of the headline score."""
        return self.path / f"{as_file_name(score.short) or 'score'}.png"

    # What a run writes

    def save_score(self, score: Score) -> None:
        """Write down what the run is judged by. From here on the figure of that score is the run's."""
        written = read_config_file(self.config_file)
        if "score" not in written and (figure := self.figure(score)).exists():
            self._refuse([figure.name])
        if written.get("score") != (values := asdict(score)):
            write_json(self.config_file, {**written, "score": values})

    def save_inference(self, needed: Mapping[str, Any]) -> None:
        """Write down what using the model takes besides its weights, with its SHA-256."""
        written = _bytes_of({**needed, _SEAL: _seal(needed)})
        if not self.inference_file.exists() or self.inference_file.read_bytes() != written:
            write_bytes(self.inference_file, written)

    def check_keep(self, keep: str) -> None:
        """Refuse to begin keeping the best model in the middle of a run: it may be of a round that is over."""
        if keep == "best" and self.config().keep != "best" and self.metrics():
            raise InputError(
                f"--keep best comes too late for {self.path}: the model of its best round so far is gone. Go on "
                "without it, or give another --out to a new run."
            )

    def set_keep(self, keep: str) -> None:
        """Write down whether the best model is kept from here on. If it is not, the one so far goes.

        A later round may be better, and then nobody would know that this one is no longer the best.
        """
        written = read_config_file(self.config_file)
        if written["config"].get("keep", "last") != keep:
            write_json(self.config_file, {**written, "config": {**written["config"], "keep": keep}})
        if keep != "best":
            for file in (self.best_file, self._newer_best):
                file.unlink(missing_ok=True)

    def save_best(self, model: Mapping[str, Tensor], t: int) -> None:
        """Keep the model of round t beside the best one before, whose place it takes at the next checkpoint."""
        save_tensors(self._newer_best, model, {"round": t})

    def settle_best(self, rounds: int) -> None:
        """So many rounds are over for good: what is best of them takes its place, what is of a later one goes."""
        if not self._newer_best.exists():
            return
        _, values = load_tensors(self._newer_best, sealed=True)
        if values["round"] < rounds:
            os.replace(self._newer_best, self.best_file)
        else:
            self._newer_best.unlink()

    def check_best(self) -> None:
        """Refuse to go on where the model of the best round so far is gone or damaged: it cannot be had again."""
        if self.config().keep != "best":
            return
        if not self.best_file.exists():
            raise InputError(
                f"{self.best_file} is gone, the model of the best round so far: put it back, or start a new run."
            )
        load_tensors(self.best_file, sealed=True)

    def save_card(self, text: str) -> None:
        """What the model is, for people."""
        write_bytes(self.card_file, text.encode())

    def save_failure(self, reason: str) -> None:
        """Write down why the run failed, if that is possible: the failure may be a full disk."""
        with suppress(OSError):
            write_bytes(self.failure_file, (reason.strip() + "\n").encode())

    def forget_failure(self) -> None:
        """The run goes on."""
        self.failure_file.unlink(missing_ok=True)

    def append(self, metrics: Mapping[str, Any], entries: Iterable[Entry]) -> None:
        """One round's ledger and metrics."""
        self._logs[self.ledger_file.name].append(as_csv(entries))
        self._logs[self.metrics_file.name].append(json.dumps(metrics) + "\n")

    def save_classes(self, counts: np.ndarray, classes: Sequence[str]) -> None:
        """How many examples of each class each client holds; `counts` is [clients, classes]."""
        write_classes(self.classes_file, counts, classes)

    def save_by_class(self, metrics: Mapping[str, Any], classes: Sequence[str]) -> None:
        """The metrics that are by class (`test_class_…`), a line for each class."""
        write_by_class(self.by_class_file, metrics, classes)

    def save_checkpoint(self, config: Config, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replace the checkpoint. It remembers the lines of metrics and ledger that belong to it."""
        seals = {name: log.seal() for name, log in self._logs.items()}
        try:
            save_tensors(self.checkpoint_file, tensors, {**values, "digest": digest(config), "files": seals})
        except LongHeaderError as error:
            raise TrainingError(
                f"The checkpoint cannot be written. {error} The last one is kept, if there is one. Where it holds "
                f"clients' states, '{self.resuming} --client-memory-mib 0' puts these "
                "into files of their own; else a run with fewer --clients is needed."
            ) from None

    def save_model(self, model: Mapping[str, Tensor]) -> None:
        """The final model."""
        save_tensors(self.model_file, model)

    def finish(self, result: Mapping[str, Any], *, keep_checkpoint: bool) -> None:
        """How the run ended, when all else is written; then the clients' states go."""
        write_json(self.result_file, result)
        self.forget_failure()  # of another process, that tried to play it too
        if not keep_checkpoint:
            self.checkpoint_file.unlink(missing_ok=True)
            remove_states(self.clients)

    # What resuming and reporting read

    def score(self) -> Score:
        """What the run is judged by; the test accuracy where that is not written down."""
        if not self.config_file.exists():
            return ACCURACY
        return score_in(read_config_file(self.config_file))

    def inference(self) -> dict[str, Any]:
        """What using the model takes besides its weights; empty for runs of older versions, and where it is nothing."""
        if not self.inference_file.exists():
            return {}
        with readable(self.inference_file):
            needed = dict(read_json(self.inference_file))
            if needed.pop(_SEAL, _seal(needed)) != _seal(needed):
                raise ValueError("it is not what was written")
            return needed

    def failure(self) -> str | None:
        """Why the run failed; None if it did not."""
        if not self.failure_file.exists():
            return None
        with readable(self.failure_file):
            return self.failure_file.read_text().strip()

    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.result_file.exists()

    def load_checkpoint(self, config: Config) -> tuple[Tensors, dict[str, Any]] | None:
        """The newest checkpoint, if there is one."""
        if not self.checkpoint_file.exists():
            return None
        tensors, values = load_tensors(self.checkpoint_file, sealed=True)
        if not isinstance(values, dict) or values.get("digest") != digest(config):
            raise InputError(
                f"{self.checkpoint_file} belongs to another configuration than {self.config_file}: "
                "put the original config.json back, or start a new run."
            )
        for name, log in self._logs.items():
            log.check(values["files"][name])
        return tensors, values

    def cut_back(self, checkpoint: Mapping[str, Any] | None) -> tuple[list[dict[str, Any]], list[Entry]]:
        """Keep the lines that belong to the checkpoint with these values, forget the rest; returns what is kept."""
        for name, log in self._logs.items():
            log.cut_back(checkpoint["files"][name] if checkpoint else None)
        return self.metrics(), self.ledger()

    def metrics(self) -> list[dict[str, Any]]:
        """One dict a round; a last line that a kill has torn is left out."""
        if not self.metrics_file.exists():
            return []
        with readable(self.metrics_file):
            lines = self.metrics_file.read_text().splitlines(keepends=True)
            return [_round(json.loads(line)) for line in lines if line.endswith("\n")]

    def classes(self) -> tuple[np.ndarray, list[str]] | None:
        """The class-label distribution [clients, classes] and the classes' names, if it was written."""
        return read_classes(self.classes_file) if self.classes_file.exists() else None

    def result(self) -> dict[str, Any] | None:
        """How the run ended; None while it has not."""
        if not self.finished():
            return None
        with readable(self.result_file):
            return dict(read_json(self.result_file))

    def ledger(self) -> list[Entry]:
        """Every entry."""
        if not self.ledger_file.exists():
            return []
        with readable(self.ledger_file):
            lines = self.ledger_file.read_text().splitlines(keepends=True)[1:]
            rows = csv.reader(line for line in lines if line.endswith("\n"))
            return [Entry(int(t), int(client), way, kind, int(size)) for t, client, way, kind, size in rows]  # type: ignore[arg-type]


def _seal(values: Mapping[str, Any]) -> str:
    """The SHA-256 of these values; of what a file has of them, without the seal itself."""
    plain = {name: value for name, value in values.items() if name != _SEAL}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _bytes_of(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _round(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict) or not isinstance(line.get("round"), int):
        raise ValueError("no round's metrics")
    return line


def _default_path(config: Config) -> Path:
    """runs/TIME-ALGORITHM, with a number where that is taken."""
    stem = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{as_file_name(config.algorithm)}"
    candidates = [stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 1000))]
    return next(path for path in candidates if not path.exists())

"""The run directory: the one place that writes a run's files.

config.json         everything that decides the run, with versions; written before anything slow
metrics.jsonl       one object a round
ledger.csv          every byte by round, client, direction and kind; round -1 is the first download
checkpoint.safetensors   the newest checkpoint, between rounds; dropped when the run is finished
model.safetensors   the final merged model; of one trained by LoRA what was trained, its adapters
adapter/            these adapters in peft's own format
result.json         how the run ended; its presence says that the run is finished
classes.csv         the class-label distribution: training examples by client (rows) and class (columns)
accuracy.png, classes.png
"""

import csv
import io
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsl_sage.config import Config, digest, from_dict, from_file, to_dict
from fsl_sage.errors import InputError
from fsl_sage.records.files import as_file_name, load_tensors, save_tensors, write_bytes, write_json
from fsl_sage.wire.ledger import Entry
from fsl_sage.wire.message import Tensors

LEDGER_HEAD = "round,client,direction,kind,bytes\n"


class RunDirectory:
    """A run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.ledger_file = path / "ledger.csv"
        self.checkpoint_file = path / "checkpoint.safetensors"
        self.model_file = path / "model.safetensors"
        self.adapter = path / "adapter"
        self.result_file = path / "result.json"
        self.classes_file = path / "classes.csv"

    @classmethod
    def create(cls, config: Config) -> "RunDirectory":
        """A new run's directory, with its configuration."""
        directory = cls(config.out or _default_path(config))
        if directory.config_file.exists():
            raise InputError(
                f"{directory.path} already holds a run: go on with it by 'fsl-sage resume {directory.path}', "
                "or give another --out."
            )
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            write_json(directory.config_file, {"config": to_dict(config), "digest": digest(config), **_versions()})
        except OSError as error:
            raise InputError(f"--out {directory.path} cannot be written: {error.strerror}.") from None
        return directory

    def config(self) -> Config:
        """The configuration of the run; what it holds of options of other algorithms is left out."""
        try:
            values = json.loads(self.config_file.read_text())["config"]
        except FileNotFoundError:
            raise InputError(f"{self.path} holds no run: there is no config.json in it.") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise InputError(f"{self.config_file} is damaged: it is not a run's configuration.") from None
        except OSError as error:
            raise InputError(f"{self.config_file} cannot be read: {error.strerror}.") from None
        return from_file(from_dict(values), str(self.config_file), of_several=True)

    def abandon(self) -> None:
        """Take away a run that could not even start."""
        if not self.metrics():
            figure = self.path / "classes.png"
            for path in (self.config_file, self.metrics_file, self.ledger_file, self.classes_file, figure):
                path.unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()

    # What a run writes

    def append(self, metrics: Mapping[str, Any], entries: Iterable[Entry]) -> None:
        """One round's ledger and metrics."""
        _append(self.ledger_file, _rows(entries))
        _append(self.metrics_file, json.dumps(metrics) + "\n")

    def save_classes(self, counts: np.ndarray, classes: Sequence[str]) -> None:
        """Who holds which classes; `counts` is [clients, classes]."""
        text = io.StringIO()
        rows = ([client, *map(int, row)] for client, row in enumerate(counts))
        csv.writer(text, lineterminator="\n").writerows([["client", *classes], *rows])
        write_bytes(self.classes_file, text.getvalue().encode())

    def save_checkpoint(self, config: Config, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        save_tensors(self.checkpoint_file, tensors, {**values, "digest": digest(config)})

    def finish(self, model: Mapping[str, Tensor], result: Mapping[str, Any], *, keep_checkpoint: bool) -> None:
        """The final model and how the run ended; then the clients' states go."""
        save_tensors(self.model_file, model)
        write_json(self.result_file, result)
        if not keep_checkpoint:
            self.checkpoint_file.unlink(missing_ok=True)

    # What resuming and reporting read

    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.result_file.exists()

    def load_checkpoint(self, config: Config) -> tuple[Tensors, dict[str, Any]] | None:
        """The newest checkpoint, if there is one."""
        if not self.checkpoint_file.exists():
            return None
        tensors, values = load_tensors(self.checkpoint_file)
        if not isinstance(values, dict) or values.get("digest") != digest(config):
            raise InputError(
                f"{self.checkpoint_file} belongs to another configuration than {self.config_file}: "
                "put the original config.json back, or start a new run."
            )
        return tensors, values

    def cut_back(self, rounds: int) -> tuple[list[dict[str, Any]], list[Entry]]:
        """Keep what was written of the first `rounds` rounds, forget the rest; returns what is kept."""
        metrics = [line for line in self.metrics() if line["round"] < rounds]
        entries = [entry for entry in self.ledger() if entry.round < rounds] if rounds else []
        write_bytes(self.ledger_file, (LEDGER_HEAD + _rows(entries)).encode())
        write_bytes(self.metrics_file, "".join(json.dumps(line) + "\n" for line in metrics).encode())
        return metrics, entries

    def metrics(self) -> list[dict[str, Any]]:
        """One dict a round; a last line that a kill has torn is left out."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def classes(self) -> tuple[np.ndarray, list[str]] | None:
        """The class-label distribution [clients, classes] and the classes' names, if it was written."""
        if not self.classes_file.exists():
            return None
        with open(self.classes_file, newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file)
        return np.array([[int(count) for count in row[1:]] for row in rows]), head[1:]

    def result(self) -> dict[str, Any] | None:
        """How the run ended; None while it has not."""
        return json.loads(self.result_file.read_text()) if self.finished() else None

    def ledger(self) -> list[Entry]:
        """Every entry."""
        if not self.ledger_file.exists():
            return []
        lines = [line for line in self.ledger_file.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
        return [Entry(int(t), int(client), way, kind, int(size)) for t, client, way, kind, size in csv.reader(lines)]  # type: ignore[arg-type]


def _default_path(config: Config) -> Path:
    """runs/TIME-ALGORITHM, with a number where that is taken."""
    stem = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{as_file_name(config.algorithm)}"
    candidates = [stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def _append(path: Path, text: str) -> None:
    # One write, so that a reader sees whole lines; what a kill tears, `cut_back` removes.
    with open(path, "a", newline="") as file:
        file.write(text)


def _rows(entries: Iterable[Entry]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(entries)
    return text.getvalue()


def _versions() -> dict[str, Any]:
    return {
        "versions": {
            "fsl-sage": version("fsl-sage"),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }

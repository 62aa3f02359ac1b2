"""One run as it is watched: what its directory says, look by look."""

import json
import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from fsl_sage.algorithms.looks import colour_of, place_of, title_of
from fsl_sage.errors import InputError, sentence
from fsl_sage.problems.score import ACCURACY
from fsl_sage.records.activity_file import ACTIVITY
from fsl_sage.records.config_file import score_in
from fsl_sage.records.pace import time_left
from fsl_sage.records.run_directory import LEDGER_HEADER, RunDirectory
from fsl_sage.report.options import heterogeneity, written_options
from fsl_sage.watch.growing import Growing, small_json, small_text
from fsl_sage.wire.ledger import NOT_IN_PAPER

State = Literal["waiting", "running", "stopped", "failed", "finished", "damaged"]
SHOWN = (
    "test_loss",
    "train_loss",
    "fidelity_cosine",
    "fidelity_nmse",
    "bytes_paper",
    "bytes_total",
    "seconds",
    "elapsed_seconds",
)
"""The metrics of a round that the page draws besides the headline score."""
SILENCE = 600.0
"""Seconds after which a run on another machine, of which only its files are known, is taken for stopped."""
_OPTIONS = ("model.name", "data.name", "clients", "batch_size", "rounds", "budget_gib", "max_seconds", "seed", "engine")


class WatchedRun:
    """A run's directory, read as it grows."""

    def __init__(self, number: int, name: str, path: Path) -> None:
        self.number = number
        """What the page calls it by."""
        self.looked = -1e9
        self.name = name
        self.path = path
        self.rounds: list[dict[str, float | None]] = []
        self.generation = 0
        """Grows when the rounds begin anew, as after a resume that cuts them back."""
        self._bytes: dict[tuple[str, str], int] = defaultdict(int)
        self._directory = directory = RunDirectory(path)
        self._metrics = Growing(directory.metrics_file, self._take_round, self._forget_rounds)
        self._ledger = Growing(directory.ledger_file, self._take_entry, self._bytes.clear)
        self._score = ACCURACY
        self._options: dict[str, Any] = {}
        self._started = ""
        self._config_changed = -1.0
        self._problem: str | None = None
        self._result: dict[str, Any] | None = None
        self._read_all = False

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end, and all of it has been read."""
        return self._result is not None and self._read_all

    # What the files say

    def look(self) -> None:
        """Read what the run has written since the last look."""
        self._read_config()
        self._read_all = not any([self._metrics.look(), self._ledger.look()])
        self._result = small_json(self._directory.result_file)

    def _read_config(self) -> None:
        try:
            changed = self._directory.config_file.stat().st_mtime
        except OSError:
            changed = 0.0
        if changed == self._config_changed:
            return
        self._config_changed = changed
        written = small_json(self._directory.config_file)
        try:
            if written is None or not isinstance(written.get("config"), dict):
                raise ValueError
            self._options = written_options(written["config"])
            self._score = score_in(written)
            self._started = str(written.get("started", ""))
            self._problem = None
        except (InputError, ValueError, KeyError, TypeError, AttributeError):
            self._problem = "config.json is damaged"

    def _take_round(self, line: str) -> None:
        found = json.loads(line)
        if not isinstance(found, dict) or type(found.get("round")) is not int or not 0 <= found["round"] < 10**9:
            raise ValueError("no round's metrics")
        kept = {name: _number(found.get(name)) for name in (self._score.name, *SHOWN)}
        missing = found.get("missing")
        self.rounds.append(
            {
                "round": found["round"],
                "aligned": float(found.get("aligned") is True),
                "missing": float(len(missing)) if isinstance(missing, list) else 0.0,
                **kept,
            }
        )

    def _forget_rounds(self) -> None:
        self.rounds = []
        self.generation += 1

    def _take_entry(self, line: str) -> None:
        if line + "\n" == LEDGER_HEADER or not line:
            return
        _, _, direction, kind, size = line.split(",")
        if direction not in ("up", "down") or not kind:
            raise ValueError("no entry of a ledger")
        self._bytes[kind, direction] += int(size)

    # What the page is told

    def summary(self, alive: bool) -> dict[str, Any]:
        """All but the curves; `alive` says whether a comparison that has planned this run is going on."""
        state, reason = self._state(alive)
        activity = small_json(self.path / ACTIVITY) if state == "running" else None
        algorithm = str(self._options.get("algorithm", "?"))
        score = self._score
        return {
            "number": self.number,
            "name": self.name,
            "state": state,
            "reason": reason,
            "algorithm": algorithm,
            "title": title_of(algorithm),
            "colour": colour_of(algorithm),
            "place": place_of(algorithm),
            "setting": self._setting(),
            "options": {path: _plain(self._options.get(path)) for path in _OPTIONS},
            "score": {
                "name": score.name,
                "title": score.title,
                "short": score.short,
                "percent": score.percent,
                "higher": score.higher_is_better,
            },
            "generation": self.generation,
            "rounds": len(self.rounds),
            "last": self.rounds[-1] if self.rounds else None,
            "best": self._best(),
            "left": self._left() if state == "running" else None,
            "written": self._metrics.changed,
            "started": self._started[:40],
            "activity": _activity(activity),
            "bytes": [
                {"kind": kind, "direction": direction, "bytes": size, "paper": kind not in NOT_IN_PAPER}
                for (kind, direction), size in sorted(self._bytes.items())
            ],
            "damaged": self._metrics.damaged + self._ledger.damaged,
            "resume": self._directory.resuming if state in ("stopped", "failed") else None,
        }

    def _state(self, alive: bool) -> tuple[State, str]:
        if self._problem is not None:
            return "damaged", self._problem
        if self._result is not None:
            remark = str(self._result.get("remark") or "")
            return "finished", " ".join(filter(None, (str(self._result.get("stopped", "")), remark)))[:500]
        if is_played(small_json(self.path / ".lock"), self._last_sign()):
            return "running", ""
        if (failure := small_text(self._directory.failure_file, 4000)) is not None:
            return "failed", sentence(failure.strip()[:1000])
        if alive:
            return "waiting", ""
        return "stopped", "" if self.rounds else "It has not finished a round."

    def _last_sign(self) -> float:
        """When the run wrote something last."""
        signs = [self._metrics.changed, self._config_changed]
        with suppress(OSError):
            signs.append((self.path / ACTIVITY).stat().st_mtime)
        return max(signs)

    def _setting(self) -> str:
        try:
            return heterogeneity(self._options)
        except (KeyError, ValueError, TypeError):
            return ""

    def _best(self) -> float | None:
        scores = [value for line in self.rounds if (value := line[self._score.name]) is not None]
        return self._score.best(scores) if scores else None

    def _left(self) -> float | None:
        """Seconds from the end of the newest round to the end of the run."""
        if not self.rounds:
            return None
        rounds, budget, seconds = (self._options.get(name) for name in ("rounds", "budget_gib", "max_seconds"))
        try:
            left = time_left(self.rounds[-1], rounds, budget, seconds, self.rounds[0])  # type: ignore[arg-type]
        except (TypeError, ZeroDivisionError):  # a line, or an option, without what it takes
            return None
        return left if math.isfinite(left) else None


def is_played(lock: Mapping[str, Any] | None, last_sign: float) -> bool:
    """Whether the process that signed a lock is still there.

    Args:
        lock: What it wrote: its number and its machine.
        last_sign: When it last wrote anything, which decides where the machine is another.
    """
    if lock is None:
        return False
    process = lock.get("process")
    if lock.get("machine") != socket.gethostname() or type(process) is not int or process <= 0:
        return time.time() - last_sign < SILENCE
    try:
        os.kill(process, 0)  # signal 0 is none: the system only says whether there is such a process
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return not _is_zombie(process)


def _is_zombie(process: int) -> bool:
    """Whether a process has ended, and only its parent has not asked how; False where the system does not say."""
    stat = small_text(Path(f"/proc/{process}/stat"), 4000)
    return stat is not None and stat.rpartition(")")[2].split()[:1] == ["Z"]


def _activity(said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a run says of itself, in the form that the page expects."""
    if said is None:
        return None
    workers = said.get("workers")
    return {
        "doing": str(said.get("doing", ""))[:200],
        "time": _number(said.get("time")),
        "workers": [
            {"name": str(each.get("name"))[:40], "doing": str(each.get("doing"))[:200], "since": _number(each["since"])}
            for each in (workers if isinstance(workers, list) else [])[:256]
            if isinstance(each, dict) and "since" in each
        ],
    }


def _number(value: Any) -> float | None:
    """A finite number; None for all else, for JSON knows no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def _plain(value: Any) -> Any:
    """An option for the page: a number, or a short text."""
    return value if value is None or _number(value) is not None else str(value)[:100]

"""activity.json: what a run is doing at this moment, and each of its workers, for whoever looks into its directory."""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsl_sage.errors import InputError
from fsl_sage.reading import read_json
from fsl_sage.records.trackers import Tracker

ACTIVITY = "activity.json"
"""In the run's directory while the run goes on; what a kill leaves is overwritten when the run is resumed."""
PAUSE = 1.0
"""Seconds between two writings, at least."""


class ActivityFile(Tracker):
    """Writes down what a run is doing. It decides no number, and a full disk does not trouble it."""

    def __init__(
        self, directory: Path, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._path = directory / ACTIVITY
        self._clock = clock
        self._now = now
        self._next = clock()
        self._stage = ""
        self._workers: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def activity(self, doing: str) -> None:
        """Remember who is doing what; write it down at most once in a while, and at once when a stage begins."""
        with self._lock:
            stage, written = re.sub(r"\d+", "", doing), self._stage
            if stage != self._stage:  # what workers did before is over
                self._stage = stage
                self._workers.clear()
            # A thread of the user's own may be called worker_main.
            if speaker := re.fullmatch(r"worker_(\d+)", threading.current_thread().name):
                self._workers[f"worker {int(speaker[1]) + 1}"] = (doing, self._now())
            if self._clock() >= self._next or stage != written:
                self._next = self._clock() + PAUSE
                self._write(doing)

    def _write(self, doing: str) -> None:
        workers = [
            {"name": name, "doing": said, "since": since} for name, (said, since) in sorted(self._workers.items())
        ]
        temporary = self._path.with_name(self._path.name + ".part")
        with suppress(OSError):
            temporary.write_text(json.dumps({"doing": doing, "time": self._now(), "workers": workers}))
            os.replace(temporary, self._path)

    def close(self) -> None:
        """The run does nothing any more."""
        with self._lock, suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_activity(directory: Path) -> dict[str, Any]:
    """What the run in a directory says that it is doing; empty where that is not known."""
    try:
        said = read_json(directory / ACTIVITY)
    except (OSError, InputError):
        return {}
    return said if isinstance(said, dict) else {}

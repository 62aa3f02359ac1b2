"""All runs under a folder, as they appear, proceed and vanish."""

import itertools
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsl_sage.records.planned import PLANNED
from fsl_sage.watch.growing import small_json
from fsl_sage.watch.watched_run import WatchedRun, is_played

DEEPEST = 5
"""Folders below the watched one in which runs are looked for."""
MOST = 300
"""Runs that are shown; of more, the newest."""
LOOK_PAUSE = 0.5
"""Seconds between two looks at the files of the runs, however many ask."""
SEARCH_PAUSE = 3.0
"""Seconds between two searches for runs."""
ENDED_PAUSE = 10.0
"""Seconds between two looks at a run that has come to its end."""


class Watched:
    """A run directory, or a folder with run directories in it. Several threads may ask."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder.resolve()
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, WatchedRun] = {}
        self._numbers = itertools.count(1)
        self._left_out = 0
        self._looked = self._searched = -1e9

    def state(self) -> dict[str, Any]:
        """Everything but the curves, for the page."""
        with self._lock:
            self._look()
            plan = small_json(self.folder / PLANNED)
            alive = is_played(plan, 0.0)
            planned = _planned(plan) if alive else {}
            runs = [run.summary(name in planned) for name, run in self._runs.items()]
            waiting = [{"name": name, "rounds": rounds} for name, rounds in planned.items() if name not in self._runs]
            return {
                "folder": self.folder.name,
                "first": shlex.quote(str(self.folder / "first")),
                "exists": self.folder.is_dir(),
                "time": time.time(),
                "runs": runs,
                "waiting": waiting,
                "comparison": alive,
                "at_once": _whole(plan.get("at_once")) if plan and alive else 1,
                "left_out": self._left_out,
            }

    def rounds(self, number: int, begin: int) -> dict[str, Any] | None:
        """The rounds of a run from place `begin` on; None if no run has this number."""
        with self._lock:
            run = next((run for run in self._runs.values() if run.number == number), None)
            if run is None:
                return None
            return {"generation": run.generation, "begin": begin, "rounds": run.rounds[begin:]}

    def _look(self) -> None:
        now = self._clock()
        if now - self._searched >= SEARCH_PAUSE:
            self._searched = now
            self._search()
        if now - self._looked >= LOOK_PAUSE:
            self._looked = now
            for run in self._runs.values():
                if not run.ended or now - run.looked >= ENDED_PAUSE:
                    run.looked = now
                    run.look()

    def _search(self) -> None:
        found = dict(self._found())
        if len(found) > MOST:
            newest = sorted(found, key=lambda name: _changed(found[name]), reverse=True)[:MOST]
            self._left_out, found = len(found) - MOST, {name: found[name] for name in sorted(newest)}
        else:
            self._left_out = 0
        self._runs = {
            name: self._runs.get(name) or WatchedRun(next(self._numbers), name, path) for name, path in found.items()
        }

    def _found(self) -> Iterator[tuple[str, Path]]:
        """(name, directory) of every run. No link is followed: it could lead out of the folder."""
        for path, folders, files in os.walk(self.folder):
            here = Path(path)
            below = here.relative_to(self.folder)
            if "config.json" in files and not (here / "config.json").is_symlink():
                folders.clear()  # a run has no runs in it
                yield (str(below) if below.parts else self.folder.name), here
            elif len(below.parts) >= DEEPEST:
                folders.clear()
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _planned(plan: dict[str, Any] | None) -> dict[str, int]:
    """The rounds of each run that a comparison has planned, by name."""
    runs = plan.get("runs") if plan else None
    return {
        str(each.get("name"))[:300]: _whole(each.get("rounds"))
        for each in (runs if isinstance(runs, list) else [])[:MOST]
        if isinstance(each, dict)
    }


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 < value < 10**9 else 1

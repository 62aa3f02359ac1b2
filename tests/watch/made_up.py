"""Runs with made-up numbers that go on, have stopped or failed; and a server that watches them."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsl_sage.records.activity_file import ACTIVITY
from fsl_sage.watch.folder import Watched
from fsl_sage.watch.server import Server
from tests.report.made_up import made_up_config, write_run

NOBODY = 2**22 + 1
"""No process has this number: Linux has at most 2**22."""


def run_of(
    path: Path, algorithm: str = "fsl-sage", rounds: int = 12, *, finished: bool = False, **options: Any
) -> Path:
    """A run with so many of its 12 rounds; the rest is kept for `go_on`."""
    write_run(path, made_up_config(algorithm, clients=3, **options), finished=finished)
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:rounds]))
    (path.parent / f".{path.name}").write_text("".join(lines[rounds:]))
    return path


def go_on(path: Path, rounds: int = 1) -> None:
    """The next rounds of a run."""
    rest = path.parent / f".{path.name}"
    lines = rest.read_text().splitlines(keepends=True)
    with open(path / "metrics.jsonl", "a") as file:
        file.write("".join(lines[:rounds]))
    rest.write_text("".join(lines[rounds:]))


def played(path: Path, process: int | None = None, machine: str | None = None) -> Path:
    """As if a process, this one if none is named, were playing the run."""
    who = {"process": process or os.getpid(), "machine": machine or socket.gethostname(), "since": "now"}
    (path / ".lock").write_text(json.dumps(who))
    workers = [{"name": "worker 1", "doing": "training client 2 of 3", "since": time.time() - 4}]
    (path / ACTIVITY).write_text(json.dumps({"doing": "training client 2 of 3", "time": 1.0, "workers": workers}))
    return path


class Looks(Watched):
    """Looks anew whenever it is asked."""

    def __init__(self, folder: Path) -> None:
        self._time = 0.0
        super().__init__(folder, self._tick)

    def _tick(self) -> float:
        self._time += 1000
        return self._time

    def runs(self) -> dict[str, dict[str, Any]]:
        return {run["name"]: run for run in self.state()["runs"]}


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

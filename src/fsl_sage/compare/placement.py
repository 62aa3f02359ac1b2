"""Where the runs of a grid go: processes of this machine, or machines of a Ray cluster."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from subprocess import Popen
from typing import NamedTuple

from fsl_sage.compare.grid_run import GridRun, Start
from fsl_sage.compare.one_run import start_process
from fsl_sage.config import Config
from fsl_sage.devices import pick_device
from fsl_sage.errors import MissingExtra


class Placement(NamedTuple):
    """How many runs there is room for, and how one is started."""

    at_once: int
    workers: int
    """Workers of each run."""
    start: Start


@contextmanager
def place(config: Config, runs: int, jobs: int | None, *, own_modules: bool = False) -> Iterator[Placement]:
    """The placement of so many runs, on this machine or over the Ray cluster that the configuration names.

    Args:
        config: Its engine, device, threads and workers decide.
        runs: The number of runs.
        jobs: How many run side by side at most; by the cores if not given.
        own_modules: Whether the runs import modules of the user's own.
    """
    if config.engine != "ray":
        yield Placement(*side_by_side(config, runs, jobs), start_here)
        return
    if find_spec("ray") is None:
        raise MissingExtra("--engine ray", "ray")
    from fsl_sage.compare.on_ray import on_cluster

    with on_cluster(config, runs, jobs, own_modules=own_modules) as placement:
        yield placement


def side_by_side(config: Config, runs: int, jobs: int | None) -> tuple[int, int]:
    """(runs at once, workers of each): together about as many as there are cores; one at a time on a GPU."""
    cores = max(1, _cores() // config.threads)
    if jobs is None:
        jobs = cores if pick_device(config.device).type == "cpu" else 1
    jobs = max(1, min(jobs, runs))
    return jobs, config.workers or max(1, cores // jobs)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_here(run: GridRun, workers: int) -> Popen[bytes]:
    """Start a run in a process of its own on this machine."""
    # A session of its own: an interrupt from the keyboard reaches this process alone, which then stops the runs.
    return start_process(run.directory.path, workers, new_session=True)

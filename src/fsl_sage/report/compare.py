"""Running a grid: each run in its own process, several side by side; what is finished is not run again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fsl_sage.config import Config, option
from fsl_sage.data import KNOWN_TEXTS
from fsl_sage.engines.setup import make_dry_setup, pick_device
from fsl_sage.errors import InputError, MissingExtra, TrainingError
from fsl_sage.experiment import run_cost
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.grid import Plan
from fsl_sage.report.jobs import Job, Running, Start
from fsl_sage.report.options import records, settings_of
from fsl_sage.report.progress import Progress

Process = subprocess.Popen[bytes]
POLL_SECONDS = 0.25


def prepare(plans: Sequence[Plan], out: Path) -> list[Job]:
    """The jobs of a grid under `out`; refuses a directory that holds another run before anything starts."""
    jobs = [Job(plan, RunDirectory(out / plan.name)) for plan in plans]
    held = [job for job in jobs if job.directory.config_file.exists()]
    others = [job for job in held if records(job.directory.config()) != records(job.plan.config)]
    for job in others:
        if job.directory.metrics():
            raise _another_run(job)
    for job in held:
        if job in others:
            job.directory.abandon()
        else:
            job.look()
            job.state = "finished" if job.directory.finished() else "waiting"
    return jobs


def check_setups(plans: Sequence[Plan]) -> None:
    """Refuse impossible models, data and sizes: one dry setup for all runs that have the same shapes."""
    configs = [plan.config for plan in plans]
    shapes = [replace(config, seed=0, data=replace(config.data, partition="iid", alpha=1.0)) for config in configs]
    for config in dict.fromkeys(shapes):
        pick_device(config.device)
        make_dry_setup(config)


def _another_run(job: Job) -> InputError:
    """A run that differs only in what its algorithm does not know, such as an alignment, is not another one."""
    there, asked = (settings_of(records(config)) for config in (job.directory.config(), job.plan.config))
    differ = [f"{option(path)} {there[path]}, not {asked[path]}" for path in asked if there[path] != asked[path]]
    return InputError(
        f"{job.directory.path} holds a run with other options ({'; '.join(differ) or 'other computing options'}): "
        "give another --out, or move that directory away."
    )


def side_by_side(config: Config, runs: int, jobs: int | None) -> tuple[int, int]:
    """(runs at once, workers of each): together about as many as there are cores; one at a time on a GPU."""
    cores = max(1, _cores() // config.threads)
    if jobs is None:
        jobs = cores if pick_device(config.device).type == "cpu" else 1
    jobs = max(1, min(jobs, runs))
    return jobs, config.workers or max(1, cores // jobs)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def machines(config: Config, runs: int, jobs: int | None) -> Iterator[tuple[int, int, Start]]:
    """(runs at once, workers of each, how to start one): on this machine, or over a Ray cluster."""
    if config.engine != "ray":
        yield *side_by_side(config, runs, jobs), start_here
        return
    if find_spec("ray") is None:
        raise MissingExtra("--engine ray", "ray")
    from fsl_sage.report.on_ray import on_cluster

    with on_cluster(config, runs, jobs) as found:
        yield found


def run_grid(jobs: Sequence[Job], at_once: int, workers: int, progress: Progress, start: Start | None = None) -> None:
    """Run what is not finished, in a locked folder. An interrupt stops the runs; their checkpoints stay."""
    waiting = [job for job in jobs if job.state == "waiting"]
    running: list[tuple[Job, Running]] = []
    with progress:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    if not job.directory.config_file.exists():
                        RunDirectory.create(replace(job.plan.config, out=job.directory.path))
                    job.state = "running"
                    running.append((job, (start or start_here)(job, workers)))
                    progress.changed(job)
                time.sleep(POLL_SECONDS)
                for job, process in list(running):
                    if job.look():
                        progress.moved(job)
                    if process.poll() is not None:
                        running.remove((job, process))
                        _end(job, process)
                        progress.changed(job)
        finally:
            for job, process in running:
                _stop(job, process)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """No second comparison in the same folder at the same time (where the system has file locks)."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}.") from None
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError:
            raise InputError(f"Another comparison is running in {out}: wait for it, or give another --out.") from None
        yield


def start_here(job: Job, workers: int) -> Process:
    """A run in a process of its own on this machine."""
    command = [sys.executable, "-m", "fsl_sage.report.worker", str(job.directory.path), str(workers)]
    with open(_log(job), "wb") as log:
        # A session of its own: an interrupt from the keyboard reaches this process alone, which then stops the runs.
        return Process(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )


def _log(job: Job) -> Path:
    return job.directory.path / "run.log"


def _end(job: Job, process: Running) -> None:
    """Look how a run ended, and what it said last if it failed."""
    process.communicate()
    job.look()
    code = process.returncode
    if code == 0 and job.directory.finished():
        job.state = "finished"
        return
    job.state = "failed"
    said = [line.strip() for line in _log(job).read_text("utf-8", errors="replace").splitlines() if line.strip()]
    if code < 0:
        job.error = f"killed by signal {-code}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    else:
        job.error = said[-1] if said else "it ended without a word"


def _stop(job: Job, process: Running) -> None:
    """A checkpoint stands after every round, so a run may be ended at any moment."""
    process.terminate()
    process.communicate()
    job.state = "waiting"


def raise_failures(jobs: Sequence[Job]) -> None:
    """Say which runs failed, and why."""
    failed = [job for job in jobs if job.state == "failed"]
    if failed:
        lines = "".join(f"\n  {job.plan.name}: {job.error}" for job in failed)
        raise TrainingError(
            f"{len(failed)} of {len(jobs)} runs failed; run.log says more, the same command tries them again.{lines}"
        )


def costs_of_runs(plans: Sequence[Plan]) -> list[dict[str, int]]:
    """What each run moves, in rounds and bytes, without training."""
    known: dict[Config, dict[str, int]] = {}
    found = []
    for plan in plans:
        config = plan.config
        if config.cohort == 1 and config.data.name not in KNOWN_TEXTS:
            # Neither who is drawn nor who holds which image changes a byte; texts differ in length.
            data = replace(config.data, partition="iid", alpha=1.0)
            config = replace(config, seed=0, data=data)
        if config not in known:
            known[config] = run_cost(config)
        found.append(known[config])
    return found

"""Runs the runs of a grid, several at a time. Finished ones are left alone, interrupted ones are resumed."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from fsl_sage.compare.grid import Plan
from fsl_sage.compare.grid_run import GridRun, Running, Start, Watcher
from fsl_sage.compare.one_run import LOG
from fsl_sage.config import option
from fsl_sage.errors import InputError
from fsl_sage.problems.make import score_of
from fsl_sage.records.lock import LockedError
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.options import recorded_options, settings_of

POLL_SECONDS = 0.25


def prepare(plans: Sequence[Plan], out: Path) -> list[GridRun]:
    """The runs of a grid under `out`. A directory that holds another run is refused before anything starts."""
    runs = [GridRun(plan, RunDirectory(out / plan.name)) for plan in plans]
    held = [run for run in runs if run.directory.config_file.exists()]
    others = [run for run in held if recorded_options(run.directory.config()) != recorded_options(run.plan.config)]
    for run in others:
        if run.directory.metrics():
            raise _another_run(run)
    for run in runs:
        if run not in held and run.directory.path.exists():
            run.directory.check_free(score_of(run.plan.config))
    for run in held:
        if run in others or _looks_elsewhere(run):
            _abandon(run)
        else:
            run.look()
            run.state = "finished" if run.directory.finished() else "waiting"
            if run.state == "waiting":
                run.directory.check_keep(run.plan.config.keep)
    return runs


def _abandon(run: GridRun) -> None:
    """Take away a run that never began, unless another process is about to begin it."""
    try:
        with run.directory.held():
            if run.directory.metrics():  # since we looked
                raise _another_run(run)
            run.directory.abandon()
    except LockedError:
        raise InputError(
            f"Another process plays a run with other options in {run.directory.path}: wait for it, or give another "
            "--out."
        ) from None


def _looks_elsewhere(run: GridRun) -> bool:
    """Whether a run that has not begun would look for its data where they no longer are said to be."""
    return not run.directory.metrics() and run.directory.config().data.dir != run.plan.config.data.dir


def _another_run(run: GridRun) -> InputError:
    """The refusal of a directory that holds a run with other options."""
    configs = (run.directory.config(), run.plan.config)
    there, asked = (settings_of(recorded_options(config)) for config in configs)
    differ = [f"{option(path)} {there[path]}, not {asked[path]}" for path in asked if there[path] != asked[path]]
    return InputError(
        f"{run.directory.path} holds a run with other options ({'; '.join(differ) or 'other computing options'}): "
        "give another --out, or move that directory away."
    )


def run_grid(runs: Sequence[GridRun], at_once: int, workers: int, start: Start, watcher: Watcher) -> None:
    """Run what is not finished, in a locked folder. An interrupt stops the runs; their checkpoints stay.

    Args:
        runs: The runs of the grid, as `prepare` gives them; their states are kept up to date.
        at_once: How many run side by side.
        workers: The workers of each.
        start: Starts the process of a run.
        watcher: Told of every run that starts, moves or ends.
    """
    waiting = [run for run in runs if run.state == "waiting"]
    running: list[tuple[GridRun, Running]] = []
    watcher.start(runs)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                run = waiting.pop(0)
                config = replace(run.plan.config, out=run.directory.path)
                if not run.directory.config_file.exists():
                    RunDirectory.create(config)
                elif not run.directory.is_played():
                    run.directory.take_over(config)
                run.state = "running"
                running.append((run, start(run, workers)))
                watcher.changed(run)
            time.sleep(POLL_SECONDS)
            for run, process in list(running):
                if run.look():
                    watcher.moved(run)
                if process.poll() is not None:
                    running.remove((run, process))
                    _end(run, process)
                    watcher.changed(run)
    finally:
        for run, process in running:
            _stop(run, process)
        watcher.stop()


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Refuse a second comparison in the same folder at the same time (where the system has file locks)."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "a")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}.") from None
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError:
            raise InputError(f"Another comparison is running in {out}: wait for it, or give another --out.") from None
        except OSError:  # this file system has no locks
            pass
        yield


def _end(run: GridRun, process: Running) -> None:
    """Note how a run ended; if it failed, the last line that it printed is the reason."""
    process.communicate()
    run.look()
    code = process.returncode
    if code == 0 and run.directory.finished():
        run.state = "finished"
        return
    run.state = "failed"
    log = (run.directory.path / LOG).read_text("utf-8", errors="replace")
    said = [line.strip() for line in log.splitlines() if line.strip()]
    if code < 0:
        run.error = f"killed by signal {-code}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    else:
        run.error = said[-1] if said else "it ended and printed nothing"
    # Another process may play the run, which is why this one could not, or may have finished it.
    with suppress(InputError), run.directory.held():
        if not run.directory.finished():
            run.directory.save_failure(run.error)


def _stop(run: GridRun, process: Running) -> None:
    """Stop a run. Its last checkpoint stays, so this is possible at any moment."""
    process.terminate()
    process.communicate()
    run.state = "waiting"

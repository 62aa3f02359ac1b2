"""The public function that runs a grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsl_sage.algorithms import resolve
from fsl_sage.compare.dry import check_setups
from fsl_sage.compare.grid import Plan, make_grid, plan_runs
from fsl_sage.compare.grid_run import GridRun, Watcher
from fsl_sage.compare.placement import place
from fsl_sage.compare.scheduler import locked, prepare, run_grid
from fsl_sage.config import Config, brings_modules, require_config
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import Result
from fsl_sage.problems.make import named
from fsl_sage.records.planned import save_plan


@dataclass(frozen=True)
class Comparison:
    """The outcome of a grid of runs."""

    folder: Path
    """Holds a directory for each run; `fsl-sage report FOLDER` makes tables and figures of them."""
    results: dict[str, Result]
    """The finished runs, by name; in the order of the grid."""
    failures: dict[str, str]
    """The reasons why the other runs failed, by name."""

    def raise_failures(self) -> None:
        """Raise a TrainingError that names the runs that failed, with the reasons."""
        if self.failures:
            lines = "".join(f"\n  {name}: {error}" for name, error in self.failures.items())
            runs = len(self.failures) + len(self.results)
            raise TrainingError(
                f"{len(self.failures)} of {runs} runs failed; run.log says more, the same command tries them again."
                f"{lines}"
            )


def compare(
    config: Config,
    *,
    algorithms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    alpha: Sequence[float | str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    watcher: Watcher | None = None,
) -> Comparison:
    """Run every combination, each in a directory and a process of its own; call it again to resume.

    Runs that are finished are not run again. A run that fails does not stop the others. What cannot run is refused
    before anything starts.

    Args:
        config: What all runs have in common. With engine "ray" whole runs are placed over the cluster.
        algorithms: The algorithms; the configuration's own if none is given.
        seeds: The seeds of each; the configuration's own if none is given.
        alpha: Dirichlet parameters of the partition, or "iid"; the configuration's own partition if none is given.
        vary: Values by option, such as {"align_every": [2, 5, 10]}. Several options are combined. An option that does
            not concern an algorithm does not multiply its runs.
        out: The folder of the runs; `config.out` if not given.
        jobs: Runs side by side; by the cores if not given. It never changes a number.
        watcher: Told how the runs proceed.

    Returns:
        The results of the finished runs by name, and the reasons of those that failed.
    """
    require_config(config, "compare")
    plans = plan_grid(config, algorithms=algorithms, seeds=seeds, alpha=alpha, vary=vary)
    folder = config.out if out is None else Path(out)
    if folder is None:
        raise InputError("compare needs --out, the folder for its runs; give the same one to resume.")
    check_setups(plans)
    with locked(folder):
        runs = prepare(plans, folder)
        own = any(brings_modules(plan.config) for plan in plans)
        left = sum(run.state != "finished" for run in runs)
        with place(config, max(1, left), jobs, own_modules=own) as (at_once, workers, start):
            save_plan(folder, {run.plan.name: run.plan.config.rounds for run in runs}, at_once)
            run_grid(runs, at_once, workers, start, watcher or Watcher())
    return Comparison(
        folder,
        {run.plan.name: _result(run) for run in runs if run.state == "finished"},
        {run.plan.name: run.error for run in runs if run.state == "failed"},
    )


def plan_grid(
    config: Config,
    *,
    algorithms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    alpha: Sequence[float | str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> list[Plan]:
    """The runs that `compare` would run."""
    if config.engine == "ray":  # each run is on one machine of the cluster, and there it is a run like any other
        config = replace(config, engine="local", ray_address=None)
    return plan_runs(named(config), make_grid(algorithms, seeds, alpha, vary))


def _result(run: GridRun) -> Result:
    directory = run.directory
    ended = directory.result() or {}
    config = resolve(directory.config())
    return Result(directory.path, config, directory.metrics(), ended["stopped"], directory.score())

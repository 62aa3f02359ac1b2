"""What is known of a grid without training: whether its runs are possible, and what they will cost."""

from collections.abc import Sequence
from dataclasses import replace

from fsl_sage.compare.grid import Plan
from fsl_sage.config import Config, brings_modules
from fsl_sage.devices import pick_device
from fsl_sage.experiment import run_cost
from fsl_sage.experiment.setup import make_dry_setup
from fsl_sage.problems.make import make_dry_problem
from fsl_sage.problems.parts import META


def check_setups(plans: Sequence[Plan]) -> None:
    """Refuse impossible models, data and sizes: one dry setup for all runs that have the same shapes."""
    for config in dict.fromkeys(_of_same_shapes(plan.config) for plan in plans):
        pick_device(config.device)
        make_dry_setup(config)


def _of_same_shapes(config: Config) -> Config:
    """The configuration that stands for all runs whose shapes are the same: partition and seed do not change them.

    A problem of the user's own may have no labels to part its examples by, or give its clients as many as it likes.
    """
    if brings_modules(config):
        return config
    return replace(config, seed=0, data=replace(config.data, partition="iid", alpha=1.0))


def costs_of_runs(plans: Sequence[Plan]) -> list[dict[str, int]]:
    """The rounds and bytes of each run, without training."""
    known: dict[Config, dict[str, int]] = {}
    found = []
    for plan in plans:
        config = plan.config
        if config.cohort == 1 and not make_dry_problem(config).make_task(config, META).sizes_vary:
            # Neither who is drawn nor who holds which example changes a byte, unless they differ in their sizes.
            config = _of_same_shapes(config)
        if config not in known:
            known[config] = run_cost(config)
        found.append(known[config])
    return found

"""What is known of a grid without training."""

from dataclasses import replace

from fsl_sage.compare.dry import check_setups, costs_of_runs
from fsl_sage.compare.grid import Grid, Plan, plan_runs
from fsl_sage.config import ModelConfig, load_preset
from fsl_sage.experiment import run_cost


def test_runs_that_differ_in_what_costs_nothing_cost_the_same():
    plans = plan_runs(load_preset("paper"), Grid(("fedavg",), (1, 2), ("iid", "0.1")))
    assert costs_of_runs(plans) == [run_cost(plans[0].config)] * 4
    cohort = replace(plans[0].config, cohort=0.25, rounds=3, budget_gib=None)
    seeds = [Plan(f"seed{seed}", replace(cohort, seed=seed)) for seed in (1, 2)]
    assert costs_of_runs(seeds) == [run_cost(plan.config) for plan in seeds]


def test_u_shapes_can_be_compared(preset):
    config = replace(load_preset(preset), model=ModelConfig("small-cnn", cut="block1,block3"))
    check_setups(plan_runs(config, Grid(algorithms=("splitfed-ms", "fedavg"))))

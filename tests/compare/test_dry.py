"""What is known of a grid without training."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fsl_sage import Config, DataConfig, InputError, Score, TensorProblem
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


def unlabelled(config):
    x = torch.zeros(60, 4)
    layers = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in "ab"), nn.Linear(4, 1))  # noqa: E731
    error = Score("test_error", higher_is_better=False)
    return TensorProblem((x, x[:, :1]), (x, x[:, :1]), layers, nn.functional.mse_loss, _error, error, cut="0")


def _error(output, target):
    return (output - target).abs().squeeze(1)


def test_a_partition_that_ones_own_problem_cannot_have_is_refused_before_anything_runs():
    config = Config(clients=3, rounds=1, data=DataConfig(name="tests.compare.test_dry:unlabelled"))
    check_setups(plan_runs(config, Grid(algorithms=("fedavg",), alpha=("iid",))))
    with pytest.raises(InputError, match="goes by labels"):
        check_setups(plan_runs(config, Grid(algorithms=("fedavg",), alpha=("iid", "0.1"))))

"""The bytes of a whole run, known before it."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fsl_sage.config import load_preset
from fsl_sage.experiment import run, run_cost
from fsl_sage.report.compare import costs_of_runs
from fsl_sage.report.grid import Grid, Plan, plan_runs
from fsl_sage.report.progress import print_costs_of_grid
from fsl_sage.wire.ledger import GIB


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 4, "align_every": 2, "warm_start": True},
        {"algorithm": "cse-fsl", "clients": 4, "rounds": 3, "cohort": 0.5},
        {"algorithm": "lazy-fsl-sage", "rounds": 3, "align_until": 1},
        {"algorithm": "cse-fsl", "rounds": 3, "budget_gib": 0.0015},
        {"algorithm": "splitfed-ss", "rounds": 2},
    ],
)
def test_the_cost_of_a_run_is_what_its_ledger_says_afterwards(tiny, changes):
    config = tiny(data={"train_images": 60, "test_images": 20}, **changes)
    last = run(config).metrics[-1]
    sums = ("bytes_total", "bytes_paper", "bytes_whole_models")
    expected = {"rounds": last["round"] + 1, **{name: last[name] for name in sums}, "is_upper_bound": False}
    assert run_cost(config) == expected


def test_the_papers_run_stops_in_the_round_that_exceeds_its_budget():
    found = run_cost(load_preset("paper"))
    rounds, aligning = found["rounds"], -(-found["rounds"] // 10)
    assert found["bytes_paper"] == rounds * 138_687_040 + aligning * 84_194_080
    assert found["bytes_paper"] >= 200 * GIB > found["bytes_paper"] - 222_881_120


def test_runs_that_differ_in_what_costs_nothing_cost_the_same():
    plans = plan_runs(load_preset("paper"), Grid(("fedavg",), (1, 2), ("iid", "0.1")))
    assert costs_of_runs(plans) == [run_cost(plans[0].config)] * 4
    cohort = replace(plans[0].config, cohort=0.25, rounds=3, budget_gib=None)
    seeds = [Plan(f"seed{seed}", replace(cohort, seed=seed)) for seed in (1, 2)]
    assert costs_of_runs(seeds) == [run_cost(plan.config) for plan in seeds]


def test_a_dry_run_prints_the_bytes_of_every_run_uncut():
    plans = plan_runs(load_preset("paper"), Grid(("fedavg", "splitfed-ms"), (1,)))
    out = io.StringIO()
    print_costs_of_grid(Console(file=out, width=40), plans, costs_of_runs(plans))
    for plan, cost in zip(plans, costs_of_runs(plans), strict=True):
        assert plan.name in out.getvalue()
        assert f"{cost['bytes_paper']:,}" in out.getvalue()
        assert f"{cost['bytes_total']:,}" in out.getvalue()

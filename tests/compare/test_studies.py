"""experiments/all.py: its commands are understood, and what is recorded is what they make."""

import runpy
from pathlib import Path

import pytest

from fsl_sage.cli.parsing import parse_comparison
from fsl_sage.compare.grid import plan_runs
from fsl_sage.compare.scheduler import prepare

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
STUDIES = runpy.run_path(str(EXPERIMENTS / "all.py"))["STUDIES"]


def plans_of(preset, *options):
    arguments, grid = parse_comparison([str(EXPERIMENTS / f"{preset}.toml"), *options])
    return plan_runs(arguments.config, grid)


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_recorded_runs_are_those_that_the_commands_make(study):
    for curve, words in STUDIES[study].items():
        folder = EXPERIMENTS / "results" / study / curve
        states = {run.plan.name: run.state for run in prepare(plans_of(*words), folder)}  # refuses other options
        recorded = {file.parent.name for file in folder.glob("*/result.json")}
        assert recorded <= {name for name, state in states.items() if state == "finished"}


def test_a_study_takes_recorded_runs_as_finished(tmp_path):
    script = runpy.run_path(str(EXPERIMENTS / "all.py"))
    adopt = script["adopt"]
    adopt.__globals__.update(RESULTS=tmp_path / "results", RUNS=tmp_path / "runs")
    recorded = "cifar10-10k-images/fsl-sage_iid_seed1"
    for name in ("cifar10-10k-images/unfinished", recorded):
        (tmp_path / "results" / name).mkdir(parents=True)
    (tmp_path / "results" / recorded / "result.json").write_text("{}")
    adopt("fewer-bytes")
    adopt("cifar10-10k-images")
    found = {str(file.parent.relative_to(tmp_path / "runs")) for file in (tmp_path / "runs").rglob("result.json")}
    assert found == {recorded, "fewer-bytes/plain/fsl-sage_iid_seed1"}
    assert not (tmp_path / "runs" / "cifar10-10k-images" / "unfinished").exists()

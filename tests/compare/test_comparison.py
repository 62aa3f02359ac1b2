"""Whole comparisons: as a function, and as a command that is killed and given again."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import fsl_sage
from fsl_sage.compare.grid import Grid, plan_runs
from fsl_sage.compare.grid_run import Watcher
from fsl_sage.config import load_preset
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import run
from fsl_sage.records.run_directory import RunDirectory
from tests.compare.small_grid import processes_of, without_times
from tests.report.browser import CHROMIUM, chromium
from tests.report.test_page import check_controls


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_the_function_runs_a_grid_and_returns_its_results(preset, tmp_path):
    config = replace(load_preset(preset), rounds=1)
    out = tmp_path / "grid"
    found = fsl_sage.compare(config, algorithms=["cse-fsl", "fedavg"], alpha=["iid", 0.5], out=out)
    names = [f"{algorithm}_{alpha}_seed0" for alpha in ("iid", "alpha0.5") for algorithm in ("cse-fsl", "fedavg")]
    assert list(found.results) == names
    assert found.failures == {}
    found.raise_failures()
    result = found.results["fedavg_alpha0.5_seed0"]
    assert result.directory == out / "fedavg_alpha0.5_seed0"
    assert (result.config.algorithm, result.config.data.alpha, len(result.metrics)) == ("fedavg", 0.5, 1)
    assert result.stopped == "its one round played"
    assert result.best_accuracy == result.metrics[0]["test_accuracy"]
    again = fsl_sage.compare(config, algorithms=["cse-fsl", "fedavg"], alpha=["iid", 0.5], out=out)
    assert again == found  # times included: nothing ran again


@pytest.mark.slow
def test_a_failed_run_is_named_and_does_not_stop_the_rest(preset, tmp_path):
    told = []

    class Listening(Watcher):
        def changed(self, run):
            told.append((run.plan.name, run.state))

    config = replace(load_preset(preset), rounds=1, algorithm="cse-fsl")
    vary = {"--optimizer.name": ["sgd"], "optimizer.lr": [1e30, 0.01]}
    found = fsl_sage.compare(config, vary=vary, out=tmp_path / "grid", jobs=1, watcher=Listening())
    (failed,), (finished,) = found.failures, found.results
    assert "optimizer.lr0.01" in finished
    assert told == [(failed, "running"), (failed, "failed"), (finished, "running"), (finished, "finished")]
    with pytest.raises(TrainingError) as error:
        found.raise_failures()
    assert "1 of 2 runs failed" in str(error.value)
    assert f"{failed}: Client 0 failed in round 0: its client loss became nan" in str(error.value)


def test_what_cannot_run_is_refused_before_anything_starts(preset, tmp_path):
    config = load_preset(preset)
    for vary, says in (({"model.name": ["small-cnn", "huge"]}, "--model.name huge"), ({"clients": [3, 76]}, "too few")):
        with pytest.raises(InputError, match=says):
            fsl_sage.compare(config, vary=vary, out=tmp_path / "grid")
    with pytest.raises(InputError, match="compare needs --out"):
        fsl_sage.compare(config)
    assert not (tmp_path / "grid").exists()


def command(preset, out, *options):
    """The command as a user gives it, in a process of its own."""
    command = [sys.executable, "-m", "fsl_sage", "compare", str(preset), "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_a_grid_is_killed_and_resumed_and_its_report_works_in_a_browser(preset, tmp_path):
    out = tmp_path / "grid"
    killed = command(preset, out, "--jobs", "2")
    until(lambda: any(file.stat().st_size for file in out.glob("*/metrics.jsonl")))
    killed.kill()
    killed.communicate()
    until(lambda: not processes_of(out))  # no run goes on without the one that watches it
    finished = {file: file.stat().st_mtime_ns for file in out.glob("*/result.json")}
    assert len(finished) < 4

    again = command(preset, out, "--jobs", "2", "--target", "0.1")
    told, errors = again.communicate(timeout=300)
    assert again.returncode == 0, told + errors
    names = [f"{algorithm}_iid_seed{seed}" for seed in (1, 2) for algorithm in ("fsl-sage", "cse-fsl")]
    assert sorted(path.parent.name for path in out.glob("*/result.json")) == sorted(names)
    assert {file: file.stat().st_mtime_ns for file in finished} == finished, "finished runs are left alone"
    config = plan_runs(load_preset(preset), Grid(seeds=(2,)))[0].config
    alone = run(replace(config, out=tmp_path / "alone", workers=3))
    assert without_times(alone.directory) == without_times(out / "fsl-sage_iid_seed2")
    ledger = RunDirectory(alone.directory).ledger_file.read_text()
    assert ledger == RunDirectory(out / "fsl-sage_iid_seed2").ledger_file.read_text()

    assert "The report is" in told
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    with chromium(tmp_path / "profile") as page:
        page.size(1280, 900)
        page.open(out / "report" / "report.html")
        check_controls(page, ["FSL-SAGE", "CSE-FSL"])

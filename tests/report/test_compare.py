"""Running a grid: in processes of their own, resumed after any end, with the numbers of single runs."""

import io
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fsl_sage import cli
from fsl_sage.cli import commands
from fsl_sage.config import ModelConfig, load_preset
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import run
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.compare import check_setups, locked, prepare, raise_failures, run_grid, side_by_side
from fsl_sage.report.grid import Grid, plan_runs
from fsl_sage.report.progress import Progress
from tests.report.browser import CHROMIUM, chromium
from tests.report.made_up import write_run
from tests.report.test_page import check_controls

PRESET = """
clients = 3
rounds = 2
batch_size = 16
align_every = 1
device = "cpu"
[data]
train_images = 150
test_images = 100
[model]
name = "small-cnn"
[alignment]
steps = 3
[compare]
algorithms = ["fsl-sage", "cse-fsl"]
seeds = [1, 2]
"""
TIMES = ("seconds", "elapsed_seconds")


def compare(preset, out, *options):
    """The command as a user gives it, in a process of its own."""
    command = [sys.executable, "-m", "fsl_sage", "compare", str(preset), "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def processes_of(folder):
    """Processes of runs under a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"fsl_sage.report.worker" in words and any(word.startswith(os.fsencode(folder)) for word in words):
            found.append(int(file.parent.name))
    return found


def without_times(directory):
    return [
        {name: value for name, value in line.items() if name not in TIMES} for line in RunDirectory(directory).metrics()
    ]


@pytest.fixture
def preset(tmp_path):
    file = tmp_path / "preset.toml"
    file.write_text(PRESET)
    return file


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_a_grid_is_killed_and_resumed_and_its_report_works_in_a_browser(preset, tmp_path):
    out = tmp_path / "grid"
    killed = compare(preset, out, "--jobs", "2")
    until(lambda: any(file.stat().st_size for file in out.glob("*/metrics.jsonl")))
    killed.kill()
    killed.communicate()
    until(lambda: not processes_of(out))  # no run goes on without the one that watches it
    finished = {file: file.stat().st_mtime_ns for file in out.glob("*/result.json")}
    assert len(finished) < 4

    again = compare(preset, out, "--jobs", "2", "--target", "0.1")
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


def grid_of(preset, out, **grid):
    return prepare(plan_runs(load_preset(preset), Grid(**grid)), out)


class Interrupting(Progress):
    """A person who presses Ctrl-C after the first round."""

    def moved(self, job):
        raise KeyboardInterrupt


def test_an_interrupt_stops_the_runs_which_can_go_on(preset, tmp_path):
    jobs = grid_of(preset, tmp_path / "grid", algorithms=("cse-fsl",), vary={"rounds": (1000,)})
    with pytest.raises(KeyboardInterrupt):
        run_grid(jobs, 1, 1, Interrupting(Console(file=io.StringIO()), jobs))
    assert processes_of(tmp_path) == []
    assert [job.state for job in jobs] == ["waiting"]
    (again,) = grid_of(preset, tmp_path / "grid", algorithms=("cse-fsl",), vary={"rounds": (1000,)})
    assert again.state == "waiting"
    assert again.last["round"] >= 0


def test_a_failed_run_is_reported_while_the_rest_go_on(preset, tmp_path):
    out = io.StringIO()
    vary = {"rounds": (1,), "optimizer.name": ("sgd",), "optimizer.lr": (1e30, 0.01)}
    jobs = grid_of(preset, tmp_path / "grid", algorithms=("cse-fsl",), vary=vary)
    run_grid(jobs, 1, 1, Progress(Console(file=out, width=60), jobs))
    assert [job.state for job in jobs] == ["failed", "finished"]
    assert "The loss of client 0 became nan in round 0" in jobs[0].error
    assert f"{jobs[0].plan.name}: failed  {jobs[0].error}\n" in out.getvalue()
    with pytest.raises(TrainingError) as error:
        raise_failures(jobs)
    assert "1 of 2 runs failed" in str(error.value)
    assert jobs[0].error in str(error.value)
    raise_failures(jobs[1:])


def test_a_directory_that_holds_another_run_is_refused(preset, tmp_path):
    name = grid_of(preset, tmp_path)[0].plan.name
    write_run(tmp_path / name, replace(load_preset(preset), rounds=7))
    with pytest.raises(InputError, match=f"{name} holds a run with other options .--rounds 7, not 2.: give another"):
        grid_of(preset, tmp_path)


def test_a_run_that_differs_in_what_its_algorithm_does_not_know_is_the_same(preset, tmp_path):
    base = load_preset(preset)
    held = replace(base, alignment=replace(base.alignment, steps=base.alignment.steps + 1))
    for algorithm in ("cse-fsl", "fedavg", "fsl-sage"):
        (job,) = grid_of(preset, tmp_path, algorithms=(algorithm,), seeds=(1,))
        write_run(tmp_path / job.plan.name, replace(held, algorithm=algorithm, seed=1))
        if algorithm == "fsl-sage":
            with pytest.raises(InputError, match=r"holds a run with other options .--alignment\.steps"):
                grid_of(preset, tmp_path, algorithms=(algorithm,), seeds=(1,))
        else:
            grid_of(preset, tmp_path, algorithms=(algorithm,), seeds=(1,))


def test_a_directory_whose_run_never_began_is_taken_over(preset, tmp_path):
    name = grid_of(preset, tmp_path)[0].plan.name
    RunDirectory.create(replace(load_preset(preset), rounds=7, out=tmp_path / name))
    assert grid_of(preset, tmp_path)[0].state == "waiting"
    assert not (tmp_path / name).exists()


def test_a_finished_run_is_not_run_again(preset, tmp_path):
    name = grid_of(preset, tmp_path)[0].plan.name
    write_run(tmp_path / name, load_preset(preset))
    jobs = grid_of(preset, tmp_path)
    run_grid(jobs, 1, 1, Progress(Console(file=io.StringIO()), jobs))
    assert [job.state for job in jobs] == ["finished"]
    assert not (tmp_path / name / "run.log").exists()


def test_what_cannot_run_is_refused_before_anything_starts(preset, tmp_path, capsys):
    for vary, says in (("model.name=small-cnn,huge", "--model.name huge"), ("clients=3,76", "too few")):
        with pytest.raises(SystemExit):
            cli.main(["compare", str(preset), "--out", str(tmp_path / "grid"), "--vary", vary])
        assert says in capsys.readouterr().err
    assert not (tmp_path / "grid").exists()


def test_u_shapes_can_be_compared(preset):
    config = replace(load_preset(preset), model=ModelConfig("small-cnn", cut="block1,block3"))
    check_setups(plan_runs(config, Grid(algorithms=("splitfed-ms", "fedavg"))))


def test_a_second_comparison_in_the_same_folder_is_refused(preset, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begun = RunDirectory.create(replace(load_preset(preset), rounds=7, out=tmp_path / "fsl-sage_iid_seed0"))
        with pytest.raises(InputError, match="Another comparison is running"), locked(tmp_path):
            pass
        with pytest.raises(SystemExit):
            cli.main(["compare", str(preset), "--out", str(tmp_path)])
        assert begun.config().rounds == 7  # a run in its first round is not taken for one that never began
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("cores", "threads", "runs", "jobs", "expected"),
    [
        (8, 1, 20, None, (8, 1)),
        (8, 2, 20, None, (4, 1)),
        (8, 1, 2, None, (2, 4)),
        (8, 1, 20, 3, (3, 2)),
        (1, 4, 9, None, (1, 1)),
    ],
)
def test_runs_and_their_workers_share_the_cores(preset, monkeypatch, cores, threads, runs, jobs, expected):
    monkeypatch.setattr("fsl_sage.report.compare._cores", lambda: cores)
    assert side_by_side(replace(load_preset(preset), threads=threads), runs, jobs) == expected


def test_the_live_table_shows_what_runs_first_when_there_is_little_room(preset, tmp_path):
    jobs = grid_of(preset, tmp_path, seeds=tuple(range(40)))
    for job in jobs[:30]:
        job.state = "finished"
    jobs[30].state, jobs[31].state, jobs[31].error = "running", "failed", "the loss became nan"
    screen = Console(file=io.StringIO(), width=120, height=12, force_terminal=True)
    screen.print(Progress(screen, jobs)._view())
    shown = screen.file.getvalue()
    assert jobs[30].plan.name in shown
    assert "the loss became nan" in shown
    assert "30 of 40 runs finished, 1 running, 8 waiting, 1 failed" in shown
    assert shown.count("fsl-sage_iid") == 8


def test_the_command_says_how_to_go_on(preset, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_grid", interrupted)
    with pytest.raises(SystemExit) as left:
        cli.main(["compare", str(preset), "--out", str(tmp_path / "grid")])
    assert left.value.code == 130
    assert "Go on with the same command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "compare needs --out"),
        (["--vary", "align_evry=2"], "'align_evry' is not an option"),
        (["--alpha", "0"], "--data.alpha 0 is not possible"),
        (["--target", "50"], "--target 50 is not possible"),
    ],
)
def test_impossible_options_end_with_one_sentence(preset, capsys, options, message):
    with pytest.raises(SystemExit) as left:
        cli.main(["compare", str(preset), *options])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_options_override_the_presets_grid(preset, monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "costs_of_runs", lambda plans: seen.extend(plan.name for plan in plans) or [])
    monkeypatch.setattr(commands, "print_costs_of_grid", lambda *_: None)
    cli.main(["compare", str(preset), "--dry-run", "--seeds", "5", "--vary", "align_every=1,2", "--rounds", "9"])
    assert sorted(seen) == [
        "cse-fsl_iid_seed5",
        "fsl-sage_iid_seed5_align-every1",
        "fsl-sage_iid_seed5_align-every2",
    ]


def test_a_few_algorithms_of_a_preset_leave_out_what_it_says_for_the_lazy_one(preset, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(
        commands, "costs_of_runs", lambda plans: seen.extend(plan.config.align_until for plan in plans) or []
    )
    monkeypatch.setattr(commands, "print_costs_of_grid", lambda *_: None)
    preset.write_text("align_until = 5\n" + PRESET)
    cli.main(["compare", str(preset), "--dry-run"])
    cli.main(["compare", str(preset), "--dry-run", "--algorithms", "lazy-fsl-sage"])
    assert seen == [None] * 4 + [5] * 2
    with pytest.raises(SystemExit):
        cli.main(["compare", str(preset), "--dry-run", "--align-until", "3"])
    assert "--align-until concerns lazy-fsl-sage alone" in capsys.readouterr().err


def test_report_without_a_run_ends_with_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["report", str(tmp_path)])
    assert left.value.code == 2
    assert "There is no run to report" in capsys.readouterr().err

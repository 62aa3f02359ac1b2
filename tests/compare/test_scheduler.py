"""Running a grid: what is finished, interrupted, failed or another run."""

import errno
import fcntl
from dataclasses import replace
from pathlib import Path

import pytest

from fsl_sage.compare import compare
from fsl_sage.compare.grid import Grid, plan_runs
from fsl_sage.compare.grid_run import Watcher
from fsl_sage.compare.one_run import LOG
from fsl_sage.compare.placement import start_here
from fsl_sage.compare.scheduler import _end, locked, prepare, run_grid
from fsl_sage.config import digest, load_preset
from fsl_sage.errors import InputError
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.options import recorded_options
from tests.compare.small_grid import grid_of, processes_of
from tests.report.made_up import write_run


class Interrupting(Watcher):
    """A person who presses Ctrl-C after the first round."""

    def moved(self, run):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupt_stops_the_runs_which_can_go_on(preset, tmp_path):
    runs = grid_of(preset, tmp_path / "grid", algorithms=("cse-fsl",), vary={"rounds": (1000,)})
    with pytest.raises(KeyboardInterrupt):
        run_grid(runs, 1, 1, start_here, Interrupting())
    assert processes_of(tmp_path) == []
    assert [each.state for each in runs] == ["waiting"]
    (again,) = grid_of(preset, tmp_path / "grid", algorithms=("cse-fsl",), vary={"rounds": (1000,)})
    assert again.state == "waiting"
    assert again.last["round"] >= 0


def test_a_directory_that_holds_another_run_is_refused(preset, tmp_path):
    name = grid_of(preset, tmp_path)[0].plan.name
    write_run(tmp_path / name, replace(load_preset(preset), rounds=7))
    with pytest.raises(InputError, match=f"{name} holds a run with other options .--rounds 7, not 2.: give another"):
        grid_of(preset, tmp_path)


def test_where_the_data_lie_matters_to_code_of_the_users_own_alone(preset, tmp_path):
    (each,) = grid_of(preset, tmp_path, algorithms=("cse-fsl",), seeds=(1,))
    there, asked = (replace(each.plan.config.data, dir=Path(name)) for name in ("there", "here"))
    for name, same in (("cifar10", True), ("my_data:problem", False)):
        configs = [replace(each.plan.config, data=replace(data, name=name)) for data in (there, asked)]
        assert (recorded_options(configs[0]) == recorded_options(configs[1])) is same


def test_a_run_that_differs_in_what_its_algorithm_does_not_know_is_the_same(preset, tmp_path):
    base = load_preset(preset)
    held = replace(base, alignment=replace(base.alignment, steps=base.alignment.steps + 1))
    for algorithm in ("cse-fsl", "fedavg", "fsl-sage"):
        (each,) = grid_of(preset, tmp_path, algorithms=(algorithm,), seeds=(1,))
        write_run(tmp_path / each.plan.name, replace(held, algorithm=algorithm, seed=1))
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
    runs = grid_of(preset, tmp_path)
    run_grid(runs, 1, 1, start_here, Watcher())
    assert [each.state for each in runs] == ["finished"]
    assert not (tmp_path / name / "run.log").exists()


def test_a_second_comparison_in_the_same_folder_is_refused(preset, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begun = RunDirectory.create(replace(load_preset(preset), rounds=7, out=tmp_path / "fsl-sage_iid_seed0"))
        with pytest.raises(InputError, match="Another comparison is running"), locked(tmp_path):
            pass
        with pytest.raises(InputError, match="Another comparison is running"):
            compare(load_preset(preset), out=tmp_path)
        assert begun.config().rounds == 7  # a run in its first round is not taken for one that never began
    with locked(tmp_path):
        pass


def test_a_run_that_has_not_begun_looks_where_its_data_are_said_to_be_now(preset, tmp_path):
    (each,) = grid_of(preset, tmp_path, algorithms=("cse-fsl",), seeds=(1,))
    config = each.plan.config
    held = replace(config, out=tmp_path / each.plan.name, data=replace(config.data, dir=tmp_path / "mistyped"))
    RunDirectory.create(held)
    grid_of(preset, tmp_path, algorithms=("cse-fsl",), seeds=(1,))
    assert not (tmp_path / each.plan.name).exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass


def test_a_run_that_another_process_plays_has_not_failed(preset, tmp_path):
    (each,) = grid_of(preset, tmp_path, algorithms=("cse-fsl",), seeds=(1,))
    directory = RunDirectory.create(replace(each.plan.config, out=tmp_path / each.plan.name))
    with directory.held():
        run_grid([each], 1, 1, start_here, Watcher())
    assert each.state == "failed"
    assert "is being played by process" in each.error
    assert directory.failure() is None


def test_a_run_that_another_process_plays_is_not_taken_away(preset, tmp_path):
    name = grid_of(preset, tmp_path)[0].plan.name
    directory = RunDirectory.create(replace(load_preset(preset), rounds=7, out=tmp_path / name))
    with directory.held(), pytest.raises(InputError, match="Another process plays a run with other options"):
        grid_of(preset, tmp_path)
    assert directory.config().rounds == 7


@pytest.mark.slow
def test_what_changes_no_number_may_be_given_anew(preset, tmp_path):
    """An interrupted grid goes on with --on-client-failure drop."""
    base = load_preset(preset)
    (each,) = grid_of(preset, tmp_path, algorithms=("cse-fsl",), seeds=(1,))
    directory = RunDirectory.create(replace(each.plan.config, out=tmp_path / each.plan.name))
    before = directory.config()
    changed = replace(base, on_client_failure="drop", checkpoint_every=2, keep_checkpoint=True)
    (again,) = prepare(plan_runs(changed, Grid(algorithms=("cse-fsl",), seeds=(1,))), tmp_path)
    run_grid([again], 1, 1, start_here, Watcher())
    after = directory.config()
    assert (after.on_client_failure, after.checkpoint_every, after.keep_checkpoint) == ("drop", 2, True)
    assert digest(after) == digest(before)
    assert directory.checkpoint_file.exists()


def test_the_best_model_cannot_be_kept_from_the_middle_on(preset, tmp_path):
    base = load_preset(preset)
    write_run(tmp_path / "cse-fsl_iid_seed1", replace(base, algorithm="cse-fsl", seed=1), finished=False)
    with pytest.raises(InputError, match="--keep best comes too late"):
        prepare(plan_runs(replace(base, keep="best"), Grid(algorithms=("cse-fsl",), seeds=(1,))), tmp_path)


@pytest.mark.parametrize("name", ["inference.json", "failure.txt", "accuracy.png", ".lock"])
def test_what_a_run_would_write_over_is_refused_before_any_run_starts(preset, tmp_path, name):
    last = grid_of(preset, tmp_path)[-1].directory.path
    last.mkdir(parents=True)
    (last / name).write_text("mine")
    with pytest.raises(InputError, match=f"{name}.* a run would write over that"):
        grid_of(preset, tmp_path)
    assert (last / name).read_text() == "mine"


def test_a_run_that_another_process_has_begun_meanwhile_is_not_taken_away(preset, tmp_path, monkeypatch):
    """It is played when its lock is asked for, or its first round is over."""
    name = grid_of(preset, tmp_path)[0].plan.name
    directory = RunDirectory.create(replace(load_preset(preset), rounds=7, out=tmp_path / name))
    rounds = iter([[], [{"round": 0}], [{"round": 0}]])
    monkeypatch.setattr(RunDirectory, "metrics", lambda self: next(rounds, []))
    with pytest.raises(InputError, match="holds a run with other options"):
        grid_of(preset, tmp_path)
    assert directory.config().rounds == 7


def test_a_run_that_another_process_has_finished_has_not_failed(preset, tmp_path):
    (each,) = grid_of(preset, tmp_path, algorithms=("cse-fsl",), seeds=(1,))
    write_run(each.directory.path, each.plan.config)
    (each.directory.path / LOG).write_text("it is finished")
    _end(each, Failed())
    assert (each.state, each.error) == ("failed", "it is finished")
    assert each.directory.failure() is None
    each.directory.result_file.unlink()
    _end(each, Failed())
    assert each.directory.failure() == "it is finished"


class Failed:
    returncode = 2

    def communicate(self):
        pass


def test_the_lock_of_a_folder_is_not_written_over(tmp_path):
    (tmp_path / ".lock").write_text("signed by a run")
    with locked(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "signed by a run"

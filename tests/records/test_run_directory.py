"""The run directory: what is written is read back, what is damaged is refused by name."""

import json

import numpy as np
import pytest
import torch

from fsl_sage.algorithms import resolve
from fsl_sage.errors import InputError, RunWarning, TrainingError
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.records import run_directory
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.wire.ledger import Entry

ENTRIES = [Entry(0, 1, "up", "smashed", 12), Entry(0, 2, "down", "client", 7)]


@pytest.fixture
def config(tiny, tmp_path):
    return tiny(out=tmp_path / "run")


def line(t: int) -> dict[str, float]:
    return {"round": t, "test_accuracy": 0.1 * t}


def test_the_configuration_comes_back_as_it_was(config):
    directory = RunDirectory.create(config)
    again = RunDirectory(directory.path)
    assert resolve(again.config()) == config
    assert (again.metrics(), again.ledger(), again.result(), again.classes()) == ([], [], None, None)
    with pytest.raises(InputError, match=r"already holds a run: .* 'fsl-sage resume "):
        RunDirectory.create(config)


def test_rounds_come_back_as_they_were(config):
    directory = RunDirectory.create(config)
    directory.cut_back(None)  # as a run begins
    directory.append(line(0), ENTRIES)
    directory.append(line(1), [])
    again = RunDirectory(directory.path)
    assert again.metrics() == [line(0), line(1)]
    assert again.ledger() == ENTRIES


def test_a_checkpoint_takes_back_what_came_after_it(config):
    directory = RunDirectory.create(config)
    directory.cut_back(None)
    directory.append(line(0), ENTRIES)
    directory.save_checkpoint(config, {"w": torch.arange(3.0)}, {"round": 1})
    directory.append(line(1), ENTRIES)
    with directory.metrics_file.open("a") as file:
        file.write('{"round": 2, "test_')  # torn by a kill
    again = RunDirectory(directory.path)
    loaded = again.load_checkpoint(config)
    assert loaded is not None
    tensors, values = loaded
    assert torch.equal(tensors["w"], torch.arange(3.0))
    assert values["round"] == 1
    assert again.cut_back(values) == ([line(0)], ENTRIES)
    assert again.metrics_file.read_text() == json.dumps(line(0)) + "\n"


def test_a_checkpoint_of_another_configuration_is_refused(config, tiny):
    directory = RunDirectory.create(config)
    directory.cut_back(None)
    directory.append(line(0), ENTRIES)
    directory.save_checkpoint(config, {}, {})
    with pytest.raises(InputError, match="belongs to another configuration"):
        directory.load_checkpoint(tiny(out=config.out, seed=config.seed + 1))


def test_the_end_takes_the_checkpoint_away_unless_it_is_kept(config):
    directory = RunDirectory.create(config)
    directory.cut_back(None)
    directory.append(line(0), ENTRIES)
    for keep in (True, False):
        directory.save_checkpoint(config, {}, {})
        directory.save_model({"w": torch.zeros(2)})
        directory.finish({"stopped": "enough"}, keep_checkpoint=keep)
        assert directory.checkpoint_file.exists() == keep
    assert directory.finished()
    assert directory.result() == {"stopped": "enough"}


def test_classes_come_back(config):
    directory = RunDirectory.create(config)
    directory.save_classes(np.array([[3, 0], [1, 2]]), ["cat, wild", "dog"])
    found = directory.classes()
    assert found is not None
    assert (found[0].tolist(), found[1]) == ([[3, 0], [1, 2]], ["cat, wild", "dog"])


def test_the_score_is_the_accuracy_unless_another_was_written(config):
    directory = RunDirectory.create(config)
    assert directory.score() == ACCURACY
    score = Score("test_rmse", higher_is_better=False)
    directory.save_score(score)
    assert RunDirectory(directory.path).score() == score
    assert resolve(directory.config()) == config
    directory.config_file.write_text(json.dumps({"config": {}, "score": {"nme": 1}}))
    with pytest.raises(InputError, match=r"score in config\.json is damaged"):
        directory.score()


def test_a_run_that_could_not_start_leaves_nothing(config):
    directory = RunDirectory.create(config)
    directory.abandon()
    assert not directory.path.exists()
    directory = RunDirectory.create(config)
    directory.cut_back(None)
    directory.append(line(0), ENTRIES)
    directory.abandon()
    assert directory.metrics() == [line(0)]


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.csv", "classes.csv", "result.json", "config.json"])
def test_damage_is_named(config, name):
    directory = RunDirectory.create(config)
    (directory.path / name).write_text("round,client\n\x00[1,\n")
    read = {
        "metrics.jsonl": directory.metrics,
        "ledger.csv": directory.ledger,
        "classes.csv": directory.classes,
        "result.json": directory.result,
        "config.json": directory.config,
    }[name]
    with pytest.raises(InputError, match=name):
        read()


def test_other_software_is_told(config):
    directory = RunDirectory.create(config)
    written = json.loads(directory.config_file.read_text())
    written["versions"]["torch"] = "1.0"
    directory.config_file.write_text(json.dumps(written))
    with pytest.warns(RunWarning, match=r"began with torch 1\.0"):
        directory.warn_of_versions()


def test_a_file_that_cannot_be_written_is_named_with_the_remedy(config):
    directory = RunDirectory.create(config)
    said = r"model\.safetensors cannot be written: No space left.*fsl-sage resume"
    with pytest.raises(TrainingError, match=said), directory.writing():
        raise OSError(28, "No space left on device", str(directory.model_file))


@pytest.mark.parametrize(
    "name",
    [
        *("clients", "README.md", "ledger.csv", "classes.csv", "model.safetensors"),
        *("failure.txt", "activity.json", "best-newer.safetensors"),
    ],
)
def test_files_of_somebody_else_are_neither_written_over_nor_removed(config, name):
    mine = config.out / name
    mine.mkdir(parents=True) if name == "clients" else (config.out.mkdir(), mine.write_text("mine"))
    if name == "clients":
        (mine / "hospital-a.csv").write_text("mine")
    with pytest.raises(InputError, match=f"holds {name} but no run, and a run would write over that: give another"):
        RunDirectory.create(config)
    assert mine.exists()
    assert not (config.out / "config.json").exists()


def test_a_lock_that_no_run_wrote_is_not_written_over(config):
    config.out.mkdir()
    mine = config.out / ".lock"
    mine.write_text("mine")
    for use in (RunDirectory(config.out).check_free, lambda: RunDirectory.create(config)):
        with pytest.raises(
            InputError, match=r"\.lock is no lock of a run, and a run would write over that: give another"
        ):
            use()
    assert not RunDirectory(config.out).is_played()
    assert mine.read_text() == "mine"
    mine.write_text("")  # as a comparison leaves it
    RunDirectory.create(config)


def test_the_figure_of_the_score_may_not_be_somebody_elses(config):
    directory = RunDirectory.create(config)
    directory.figure(ACCURACY).write_text("mine")
    with pytest.raises(InputError, match=r"holds accuracy\.png but no run, and a run would write over that"):
        directory.save_score(ACCURACY)
    directory.figure(ACCURACY).unlink()
    directory.save_score(ACCURACY)
    directory.figure(ACCURACY).write_text("the run's own")
    directory.save_score(ACCURACY)  # as when it is resumed


def test_who_abandons_a_run_still_holds_it(config):
    directory = RunDirectory.create(config)
    with directory.held():
        directory.abandon()
        assert RunDirectory(config.out).is_played()
    assert not config.out.exists()


def test_what_an_abandoned_run_has_left_is_no_hindrance(config):
    directory = RunDirectory.create(config)
    directory.save_failure("there are no such data")
    directory.save_inference({})
    (config.out / "activity.json").write_text("{}")  # of one that was killed
    (config.out / "run.log").write_text("there are no such data")
    directory.abandon()
    RunDirectory.create(config)


def test_a_kill_while_a_run_is_taken_away_leaves_a_run(config, monkeypatch):
    """Not stray files, which the same command would refuse."""

    class KillError(Exception):
        pass

    def killed(path):
        raise KillError

    directory = RunDirectory.create(config)
    directory.save_inference({})
    monkeypatch.setattr(run_directory, "remove_states", killed)
    with pytest.raises(KillError):
        directory.abandon()
    assert directory.config_file.exists()


@pytest.mark.parametrize("way", ["abandoned", "finished"])
def test_what_is_put_beside_the_clients_states_stays(config, way):
    directory = RunDirectory.create(config)
    directory.clients.mkdir()
    state = directory.clients / f"3-{'0' * 64}.safetensors"
    for path in (state, directory.clients / "4-half.part", directory.clients / "notes.txt"):
        path.write_text("x")
    if way == "abandoned":
        directory.abandon()
    else:
        directory.finish({}, keep_checkpoint=False)
    assert [path.name for path in directory.clients.iterdir()] == ["notes.txt"]


def test_a_finished_run_has_not_failed(config):
    """A second process that wanted to play it may have left its failure."""
    directory = RunDirectory.create(config)
    directory.save_failure("it is being played by process 7")
    directory.save_model({"a": torch.zeros(2)})
    directory.finish({}, keep_checkpoint=False)
    assert directory.failure() is None


def test_whether_a_run_is_played(config):
    directory = RunDirectory.create(config)
    assert not directory.is_played()
    with directory.held():
        assert RunDirectory(config.out).is_played()


def test_the_best_model_is_of_a_round_that_a_checkpoint_has(config):
    """Else a kill would leave the model of a round that the resumed run may never reach again."""
    directory = RunDirectory.create(config)
    directory.save_best({"a": torch.tensor([1.0])}, 1)
    directory.settle_best(3)
    directory.save_best({"a": torch.tensor([4.0])}, 4)
    directory.settle_best(3)  # resumed at round 3
    weights, values = load_tensors(directory.best_file)
    assert values == {"round": 1}
    assert float(weights["a"]) == 1.0
    assert not list(config.out.glob("best-*"))

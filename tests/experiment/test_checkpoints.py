"""When a checkpoint is written."""

import pytest

from fsl_sage import Tracker, resume, run
from fsl_sage.experiment.checkpoints import Checkpoints
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory


class Stopping(Tracker):
    """Somebody presses Ctrl-C after the third round."""

    def round(self, metrics):
        if metrics["round"] == 2:
            raise KeyboardInterrupt


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def written(every, round_takes, checkpoint_takes, rounds):
    """The rounds after which one is written, and the part of the time that all of them take."""
    clock = Clock()
    checkpoints = Checkpoints(every, clock)
    found = []
    for done in range(1, rounds + 1):
        clock.now += round_takes
        if checkpoints.due(done):
            with checkpoints.writing(done):
                clock.now += checkpoint_takes
            found.append(done)
            assert checkpoints.rounds == done
    return found, len(found) * checkpoint_takes / (clock.now - 100.0)


def test_every_so_many_rounds_whatever_it_takes():
    assert written(3, 1.0, 100.0, 9)[0] == [3, 6, 9]


def test_long_rounds_have_one_each():
    assert written(None, 19.0, 1.0, 5)[0] == [1, 2, 3, 4, 5]


def test_short_rounds_share_one_so_that_they_take_a_twentieth_of_the_time():
    found, share = written(None, 1.0, 1.0, 400)
    assert found[:3] == [1, 20, 39]
    assert share == pytest.approx(0.05, abs=0.003)


def test_what_is_kept_of_a_finished_run_is_its_last_round(tiny):
    config = tiny(rounds=3, checkpoint_every=2, keep_checkpoint=True)
    file = RunDirectory(run(config).directory).checkpoint_file
    assert load_tensors(file)[1]["rounds"] == 3


def test_a_run_without_a_number_of_rounds_resumes_to_the_same_bits(tiny, monkeypatch):
    """Checkpoints that take long: the one after the first round is the only one."""
    monkeypatch.setattr("fsl_sage.experiment.checkpoints.SHARE", 0.0)
    whole = run(tiny(rounds=4, checkpoint_every=None))
    config = tiny(rounds=4, checkpoint_every=None)
    with pytest.raises(KeyboardInterrupt):
        run(config, [Stopping()])
    directory = RunDirectory(config.out)
    assert load_tensors(directory.checkpoint_file)[1]["rounds"] == 1
    assert len(directory.metrics()) == 3
    resume(config.out)
    one, other = (load_tensors(path / "model.safetensors")[0] for path in (whole.directory, config.out))
    assert all(one[name].equal(other[name]) for name in one)
    assert RunDirectory(whole.directory).ledger() == directory.ledger()

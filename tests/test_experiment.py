import errno
import itertools
import json
import os
import threading
import time
import warnings
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fsl_sage.algorithms import resolve
from fsl_sage.config import Config, load_preset
from fsl_sage.engines.base import LostError
from fsl_sage.engines.local import LocalEngine
from fsl_sage.engines.threads import Threads
from fsl_sage.errors import InputError, RunWarning, TrainingError
from fsl_sage.experiment import cost, draw_cohort, resume, run
from fsl_sage.experiment.federation import Federation
from fsl_sage.experiment.setup import make_setup
from fsl_sage.problems.make import make_problem
from fsl_sage.problems.parts import build_model
from fsl_sage.records import figures
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.trackers import StopRun, Tracker
from fsl_sage.split import SplitError
from fsl_sage.wire.ledger import BEFORE, NOT_IN_PAPER
from fsl_sage.wire.message import ACTIVATIONS, AUXILIARY
from fsl_sage.wire.paths import by_client

ALGORITHMS = ["fsl-sage", "cse-fsl", "splitfed-ms", "splitfed-ss", "fedavg"]
TIMES = ("seconds", "elapsed_seconds")


def without_times(metrics):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics]


def assert_same_run(a, b):
    """Weights, ledger and metrics, times excepted."""
    assert without_times(RunDirectory(a).metrics()) == without_times(RunDirectory(b).metrics())
    assert (a / "ledger.csv").read_bytes() == (b / "ledger.csv").read_bytes()
    first, second = (load_tensors(path / "model.safetensors")[0] for path in (a, b))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# Accounting


def test_costs_at_the_papers_setting_to_the_byte():
    costs = cost(load_preset("paper"))
    assert {name: row["bytes_paper"] for name, row in costs.items()} == {
        "fsl-sage": 138_687_040,
        "lazy-fsl-sage": 138_687_040,
        "cse-fsl": 307_075_200,
        "splitfed-ms": 874_000_960,
        "splitfed-ss": 874_000_960,
        "fedavg": 895_302_560,
        "sl": 874_000_960,
        "local-loss": 632_789_120,
        "cpsl": 874_000_960,
        "adaptsfl": 874_000_960,
        "heron-sfl": 307_075_200,
        "fedgkt": 413_600_000,
        "locfedmix-sl": 875_511_600,
        "fedprox": 895_302_560,
        "fedadam": 895_302_560,
        "fedyogi": 895_302_560,
        "scaffold": 895_302_560 + 2 * 10 * 4 * 11_181_642,  # a control for each weight, none for a buffer
    }
    assert costs["fsl-sage"]["bytes_paper_aligning"] == 222_881_120
    assert costs["fsl-sage"]["by_kind"]["labels"] == {"up": 10 * 4 * 256 * 8, "down": 0}
    assert costs["fsl-sage"]["bytes_first_download"] == 10 * (2_740_048 + 8_419_408)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "lazy-fsl-sage"])
@pytest.mark.parametrize("clients", [3, 4])  # 4 clients of 150 images: their sizes differ
def test_the_ledger_of_a_run_is_its_cost_round_by_round(tiny, algorithm, clients):
    changes = {"align_until": 0} if algorithm == "lazy-fsl-sage" else {}
    config = tiny(algorithm=algorithm, clients=clients, align_every=2, rounds=3, **changes)
    expected = cost(config, algorithms=[algorithm])[algorithm]
    result = run(config)
    entries = RunDirectory(result.directory).ledger()
    for t, line in enumerate(result.metrics):
        mine = [entry for entry in entries if entry.round == t]
        suffix = "_aligning" if line["aligned"] else ""
        assert sum(entry.bytes for entry in mine) == expected[f"bytes_total{suffix}"]
        paper = sum(entry.bytes for entry in mine if entry.kind not in NOT_IN_PAPER)
        assert paper == expected[f"bytes_paper{suffix}"]
        by_kind = {}
        for entry in mine:
            by_kind.setdefault(entry.kind, {"up": 0, "down": 0})[entry.direction] += entry.bytes
        assert by_kind == expected[f"by_kind{suffix}"]
    assert sum(entry.bytes for entry in entries if entry.round == BEFORE) == expected["bytes_first_download"]
    assert result.metrics[-1]["bytes_total"] == sum(entry.bytes for entry in entries)
    assert result.metrics[-1]["bytes_paper"] == sum(e.bytes for e in entries if e.kind not in NOT_IN_PAPER)


def test_cost_reads_sizes_from_data_that_it_does_not_know(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    np.savez(path, x=rng.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8), y=np.arange(100) % 4)
    config = load_preset("paper")
    config = replace(config, clients=2, batch_size=20, data=replace(config.data, name=f"npz:{path}"))
    assert cost(config, algorithms=["splitfed-ss"])["splitfed-ss"]["by_kind"]["activations"]["up"] == 80 * 8192


# The same bits


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_number_of_workers_changes_no_bit(tiny, algorithm):
    runs = [run(tiny(algorithm=algorithm, workers=workers)).directory for workers in (1, 3)]
    assert_same_run(*runs)


@pytest.mark.cut_anew
def test_a_seed_decides_everything(tiny):
    one, other = (run(tiny(rounds=1, seed=seed)).metrics[0]["test_loss"] for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("every", [1, 2])
def test_resume_is_exact(tiny, finished, algorithm, every, monkeypatch):
    """Interrupted in round 3, between any two checkpoints; with a cohort, so that mail and versions matter."""
    changes = {"rounds": 5, "cohort": 0.67, "align_every": 2, "algorithm": algorithm}
    whole = finished(**changes)
    config = tiny(**changes, checkpoint_every=every)
    interrupt_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


@pytest.mark.parametrize(
    "changes",
    [
        {"align_at": "start", "alignment": {"scope": "client", "optimizer_state": "kept"}},
        pytest.param({"local_auxiliary": True, "alignment": {"optimizer_state": "kept"}}, marks=pytest.mark.slow),
        {"align_rounds": [1, 3], "model": {"recalibrate": True}, "precision": "float64"},
        pytest.param(
            {"model": {"name": "tests.test_experiment:channels_last", "cut": "second"}}, marks=pytest.mark.slow
        ),
        pytest.param({"algorithm": "local-loss", "local_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"algorithm": "heron-sfl", "local_steps": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"model": {"auxiliary": "ridge:9"}, "hold": 0.5, "align_every": 3, "parameter_fidelity": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param({"alignment": {"loss": "cosine", "scope": "client"}}, marks=pytest.mark.slow),
        {"clients": 7, "clients_at_once": 2, "client_optimizer": "reset"},
    ],
    ids=[
        *("at start", "local auxiliary", "named rounds", "channels last", "local-loss", "heron-sfl", "ridge", "cosine"),
        "clients at once",
    ],
)
def test_resume_is_exact_with_options_too(tiny, monkeypatch, changes):
    changes = {"rounds": 5, "cohort": 0.67, "align_every": 2, **changes}
    whole = run(tiny(**changes)).directory
    config = tiny(**changes)
    interrupt_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


def channels_last(classes, channels):
    """A model whose weights lie in memory in another order than a checkpoint's."""
    model = nn.Sequential(
        OrderedDict(
            first=nn.Conv2d(channels, 8, 3, stride=2, padding=1),
            second=nn.Conv2d(8, 12, 3, stride=2),
            relu=nn.ReLU(),
            third=nn.Conv2d(12, 12, 3, stride=2),
            flatten=nn.Flatten(),
            last=nn.Linear(108, classes),
        )
    )
    return model.to(memory_format=torch.channels_last)


def interrupt_after(monkeypatch, rounds):
    from fsl_sage.experiment import Federation

    play = Federation.play_round

    def interrupted(self, t, cohort):
        if t == rounds:
            raise KeyboardInterrupt
        return play(self, t, cohort)

    monkeypatch.setattr(Federation, "play_round", interrupted)


@pytest.fixture
def interrupted(tiny, monkeypatch):
    """Makes a run that ended in the middle; its configuration."""

    def make(*, after, **changes):
        config = tiny(**changes)
        with monkeypatch.context() as patched:
            interrupt_after(patched, after)
            with pytest.raises(KeyboardInterrupt):
                run(config)
        return config

    return make


def test_resume_before_the_first_checkpoint_starts_anew(tiny, finished, monkeypatch):
    whole = finished()
    config = tiny()
    interrupt_after(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


@pytest.mark.parametrize("name", ["fsl-sage", "torch"])
def test_another_version_warns_that_bits_may_differ(interrupted, name):
    config = interrupted(rounds=2, after=1)
    file = config.out / "config.json"
    written = json.loads(file.read_text())
    written["versions"][name] = "0.0.1"
    file.write_text(json.dumps(written))
    with pytest.warns(RunWarning, match=f"began with {name} 0.0.1, .* bits may differ"):
        resume(config.out)


@pytest.mark.parametrize("moment", ["__init__", "load_checkpoint", "play_round", "merged"])
def test_the_s_server_may_be_lost_twice_at_any_moment(finished, interrupted, monkeypatch, moment):
    """As when Ray's actor is killed while it is started, in a round, or after the last one."""
    whole, config = finished(rounds=3), interrupted(rounds=3, after=1)
    lose(monkeypatch, moment, times=2)
    resume(config.out)
    assert_same_run(whole, config.out)


@pytest.mark.parametrize("moment", ["__init__", "play_round"])
def test_an_s_server_that_is_lost_again_and_again_ends_the_run(tiny, monkeypatch, moment):
    lose(monkeypatch, moment, times=3)
    with pytest.raises(LostError, match="the S-server is gone"):
        run(tiny())


class Told(Tracker):
    """Remembers the rounds that it was told of, and ends the run after one of them."""

    def __init__(self, last=None):
        self.last, self.starts = last, 0

    def start(self, config, directory, done):
        self.starts += 1
        self.rounds = [line["round"] for line in done]

    def round(self, metrics):
        self.rounds.append(metrics["round"])
        if metrics["round"] == self.last:
            raise StopRun("enough")


@pytest.mark.parametrize("every", [2, 10])
def test_a_callback_is_told_of_rounds_that_are_played_again_as_of_new_ones(tiny, monkeypatch, every):
    told = Told()
    lose(monkeypatch, "play_round", times=1, after=3)
    run(tiny(rounds=4, checkpoint_every=every), [told])
    assert told.starts == 2
    assert told.rounds == [0, 1, 2, 3]


@pytest.mark.parametrize("every", [1, 2, 10])
def test_a_callback_ends_a_run_after_the_same_round_if_the_s_server_is_lost_then(tiny, monkeypatch, every):
    """Whether the checkpoint has that round, or the ones before, or there is none."""
    lose(monkeypatch, "merged", times=1)
    result = run(tiny(rounds=5, checkpoint_every=every), [Told(last=2)])
    assert (len(result.metrics), result.stopped) == (3, "enough")


def lose(monkeypatch, moment, times, after=0):
    from fsl_sage.experiment import Federation

    usual, calls = getattr(Federation, moment), itertools.count()

    def failing(self, *arguments):
        if after <= next(calls) < after + times:
            raise LostError("the S-server is gone")
        return usual(self, *arguments)

    monkeypatch.setattr(Federation, moment, failing)


def test_resume_with_a_torn_last_line(tiny, finished, monkeypatch):
    whole = finished()
    config = tiny()
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    for name in ("metrics.jsonl", "ledger.csv"):
        with open(config.out / name, "a") as file:
            file.write('{"round": 1, "te' if name.startswith("m") else "1,0,up,act")
    resume(config.out)
    assert_same_run(whole, config.out)


DAMAGE = {
    "last line lost": lambda raw: raw[: raw[:-1].rindex(b"\n") + 1],
    "first line lost": lambda raw: raw[raw.index(b"\n") + 1 :],
    "emptied": lambda raw: b"",
    "cut in a line": lambda raw: raw[:-7],
    "one bit": lambda raw: bytes([*raw[:70], raw[70] ^ 1, *raw[71:]]),
    "two lines swapped": lambda raw: b"".join([*(lines := raw.splitlines(keepends=True))[:-2], lines[-1], lines[-2]]),
    "a line twice": lambda raw: b"".join([(lines := raw.splitlines(keepends=True))[0], *lines]),
    "a number changed": lambda raw: raw.replace(b"1", b"2"),
    "Windows' line ends": lambda raw: raw.replace(b"\n", b"\r\n"),
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.csv"])
def test_lines_that_are_not_those_of_the_checkpoint_are_refused(interrupted, name):
    config = interrupted(rounds=3, after=2)
    file = config.out / name
    raw = file.read_bytes()
    for damage in DAMAGE.values():
        file.write_bytes(damage(raw))
        with pytest.raises(InputError, match=rf"{name} does not fit the checkpoint, .*start a new run") as said:
            resume(config.out)
        assert "lines: " in str(said.value)
    file.unlink()
    with pytest.raises(InputError, match=rf"{name} .* cannot be read \(No such file"):
        resume(config.out)
    file.write_bytes(raw)
    assert len(resume(config.out).metrics) == 3


def test_damaged_metrics_without_a_checkpoint_are_refused_where_they_are_read(interrupted):
    directory = RunDirectory(interrupted(rounds=2, after=1).out)
    for line in ("not json", "[]", '{"round": "x"}', "[" * 100_000):
        directory.metrics_file.write_text(line + "\n")
        with pytest.raises(InputError, match=r"metrics\.jsonl is damaged"):
            directory.metrics()
    directory.ledger_file.write_text("round,client\n1,2\n")
    with pytest.raises(InputError, match=r"ledger\.csv is damaged"):
        directory.ledger()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_lines_are_on_the_disk_before_the_checkpoint_is(tiny, monkeypatch):
    """Their fsync comes before the checkpoint's, and the directory's after its rename."""
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    config = tiny(rounds=1)
    run(config)
    names = [os.path.relpath(path, config.out) for path in synced]
    place = names.index("checkpoint.safetensors.part")
    assert {"metrics.jsonl", "ledger.csv"} <= set(names[:place])
    assert names[place + 1] == "."


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.csv", "checkpoint.safetensors.part", "accuracy.png.part"])
def test_a_full_disk_keeps_the_last_checkpoint_and_says_how_to_go_on(tiny, finished, monkeypatch, name):
    whole, config = finished(rounds=3), tiny(rounds=3)
    with monkeypatch.context() as patched:
        fill_the_disk_for(patched, name, after=1)
        with pytest.raises(
            TrainingError, match=rf"{name} cannot be written: No space .* 'fsl-sage resume {config.out}'"
        ):
            run(config)
    assert not list(config.out.glob("*.part"))
    resume(config.out)
    assert_same_run(whole, config.out)


def fill_the_disk_for(monkeypatch, name, after):
    """Let the file be opened for writing so many times, then no more."""
    times = []
    builtin = open

    def full(path, mode="r", *more, **options):
        if os.path.basename(path) == name and mode not in ("r", "rb"):
            times.append(path)
            if len(times) > (0 if name.startswith("accuracy") else after):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return builtin(path, mode, *more, **options)

    monkeypatch.setattr("builtins.open", full)


def test_a_directory_that_became_read_only_is_said(interrupted, monkeypatch):
    config = interrupted(rounds=2, after=1)

    def refuse(path, *more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("fsl_sage.records.run_directory.held", lambda path: refuse(path))
    with pytest.raises(InputError, match=rf"{config.out} cannot be written: Read-only file system"):
        resume(config.out)


# Stop rules


def test_rounds(tiny):
    result = run(tiny())
    assert (len(result.metrics), result.stopped) == (2, "all 2 rounds played")


def test_budget_and_target_and_time(tiny):
    gib = cost(tiny(), algorithms=["fsl-sage"])["fsl-sage"]["bytes_paper_aligning"] / 2**30
    result = run(tiny(rounds=9, budget_gib=2.5 * gib))
    assert len(result.metrics) == 3
    assert "budget" in result.stopped
    result = run(tiny(rounds=9, target_accuracy=0.01))
    assert len(result.metrics) == 1
    assert "target accuracy" in result.stopped
    result = run(tiny(rounds=9, max_seconds=1e-9))
    assert len(result.metrics) == 1
    assert "time limit" in result.stopped


# Cohorts


def test_cohorts_are_drawn_by_round_and_have_their_size():
    config = Config(clients=10, cohort=0.3)
    drawn = [draw_cohort(config, t) for t in range(50)]
    assert all(len(set(cohort)) == 3 for cohort in drawn)
    assert {client for cohort in drawn for client in cohort} == set(range(10))
    assert draw_cohort(config, 7) == drawn[7]


# Records


@pytest.mark.drawn
def test_the_run_directory(tiny):
    config = tiny(alignment={"steps": 2})
    result = run(config)
    names = {path.name for path in result.directory.iterdir()}
    assert names == {
        "README.md", "accuracy.png", "classes.csv", "classes.png", "config.json", "inference.json", "ledger.csv",
        "metrics.jsonl", "model.safetensors", "result.json", "test_by_class.csv",
    }  # fmt: skip
    assert all((result.directory / name).read_bytes().startswith(b"\x89PNG") for name in names if name.endswith(".png"))
    written = json.loads((result.directory / "config.json").read_text())
    assert written["config"]["alignment"]["steps"] == 2
    assert written["versions"]["torch"] == torch.__version__
    assert resolve(RunDirectory(result.directory).config()) == config
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1]
    wanted = {"round", "test_accuracy", "test_loss", "train_loss", "bytes_total", "bytes_paper", "seconds",
              "fidelity_cosine", "fidelity_nmse"}  # fmt: skip
    assert all(wanted <= line.keys() for line in lines)


def test_fidelity_is_null_where_it_does_not_apply(tiny):
    assert run(tiny(algorithm="fedavg", rounds=1)).metrics[0]["fidelity_cosine"] is None


def test_the_final_model_loads_into_the_ordinary_model_and_scores_the_same(tiny):
    result = run(tiny())
    task = make_setup(result.config).settings.task
    model = build_model(result.config, make_problem(result.config), torch.device("cpu"))
    model.load_state_dict(load_tensors(result.model_file)[0])
    model.eval()
    with torch.no_grad():
        batch = task.test_batch(0)
        accuracy = (model(batch.inputs).argmax(1) == batch.target["labels"]).double().mean().item()
    assert accuracy == pytest.approx(result.metrics[-1]["test_accuracy"])


def test_the_checkpoint_is_kept_if_asked_for(tiny):
    assert RunDirectory(run(tiny(keep_checkpoint=True, rounds=1)).directory).checkpoint_file.exists()


def test_a_run_that_no_longer_keeps_the_best_model_has_none(interrupted, monkeypatch):
    """One that stayed would be taken for the best when a later round is better."""
    config = interrupted(rounds=3, after=1, keep="best")
    assert (config.out / "best.safetensors").exists()
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        resume(config.out, keep="last")
    monkeypatch.undo()
    assert not list(config.out.glob("best*"))
    resume(config.out)  # which does not ask for the best model that went
    assert not list(config.out.glob("best*"))


def test_the_best_model_cannot_be_kept_from_the_middle_on(interrupted):
    config = interrupted(rounds=2, after=1)
    with pytest.raises(InputError, match="--keep best comes too late"):
        resume(config.out, keep="best")
    resume(config.out)
    begun = interrupted(rounds=1, after=0)
    resume(begun.out, keep="best")
    assert (begun.out / "best.safetensors").exists()
    assert RunDirectory(begun.out).config().keep == "best"


def test_a_run_waits_for_the_threads_of_an_interrupted_one(tiny):
    """They share torch's generator, so a model that draws would get other bits."""
    go_on, ended = threading.Event(), threading.Event()
    threads = Threads(make_setup(tiny()))

    class LetsGo(Tracker):
        def activity(self, doing):
            if doing == "waiting for the threads of an interrupted run":
                go_on.set()
            elif doing == "loading the data":
                assert ended.is_set()

    def interrupted():
        try:
            threads.map(lambda _: (go_on.wait(30), time.sleep(0.1), ended.set()), [0])
            raise KeyboardInterrupt
        finally:
            threads.close()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    run(tiny(rounds=1), [LetsGo()])
    assert go_on.is_set()


def test_a_directory_with_a_run_is_not_overwritten(tiny):
    config = tiny(rounds=1)
    run(config)
    before = (config.out / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="already holds a run"):
        run(config)
    assert (config.out / "metrics.jsonl").read_bytes() == before
    with pytest.raises(InputError, match="is finished"):
        resume(config.out)


def test_a_checkpoint_of_another_config_is_refused(tiny, monkeypatch):
    config = tiny()
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    file = config.out / "config.json"
    file.write_text(file.read_text().replace('"batch_size": 16', '"batch_size": 20'))
    with pytest.raises(InputError, match="another configuration"):
        resume(config.out)
    assert (config.out / "checkpoint.safetensors").exists()


def test_a_damaged_checkpoint_is_refused(tiny, monkeypatch):
    config = tiny()
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    file = config.out / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="damaged"):
        resume(config.out)


def test_one_flipped_bit_in_a_checkpoint_is_found(interrupted):
    config = interrupted(rounds=2, after=1)
    file = config.out / "checkpoint.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-1000] ^= 16  # in the middle of a weight
    file.write_bytes(whole)
    with pytest.raises(InputError, match=r"checkpoint\.safetensors is damaged: .* start a new run"):
        resume(config.out)


@pytest.mark.parametrize("algorithm", ["fsl-sage", "fedavg"])
def test_a_loss_that_is_not_finite_fails_the_training(tiny, algorithm):
    config = tiny(algorithm=algorithm, optimizer={"name": "sgd", "lr": 1e30})
    with pytest.raises(TrainingError, match=r"became (nan|inf)"):
        run(config)
    assert not RunDirectory(config.out).finished()


def test_a_run_whose_score_left_every_bound_says_so(tiny):
    config = tiny(algorithm="fedavg", rounds=1, optimizer={"lr": 1e6})
    with pytest.warns(RunWarning, match="The training diverged: its last test loss is .*lower --optimizer.lr"):
        run(config)
    assert "diverged" in json.loads((config.out / "result.json").read_text())["remark"]


@pytest.mark.parametrize("score", ["test_loss", "test_accuracy"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_never_reaches_a_checkpoint(tiny, monkeypatch, score, value):
    from fsl_sage.experiment import Federation

    evaluate = Federation.evaluate
    rounds = iter([{}, {score: value}])
    monkeypatch.setattr(Federation, "evaluate", lambda self: {**evaluate(self), **next(rounds)})
    config = tiny(rounds=3)
    with pytest.raises(TrainingError, match=rf"The {score.replace('_', ' ')} became {value} in round 1"):
        run(config)
    assert len(RunDirectory(config.out).metrics()) == 1
    monkeypatch.undo()
    assert len(resume(config.out).metrics) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_client_whose_weights_are_no_numbers_is_dropped_or_stops_the_run(tiny, monkeypatch, value):
    from fsl_sage.roles.client import Client

    upload = Client.upload

    def spoilt(self, parts):
        sent = upload(self, parts)
        if self.id == 1 and self.round == 1:
            next(iter(sent["client"].values())).fill_(value)
        return sent

    monkeypatch.setattr(Client, "upload", spoilt)
    config = tiny(rounds=2)
    with pytest.raises(TrainingError, match=r"Client 1 failed in round 1: 'client/\S+' became infinite or NaN"):
        run(config)
    assert len(RunDirectory(config.out).metrics()) == 1
    result = run(tiny(rounds=2, on_client_failure="drop"))
    assert [line["missing"] for line in result.metrics] == [[], [1]]
    assert all(tensor.isfinite().all() for tensor in load_tensors(result.model_file)[0].values())


def test_a_client_that_failed_after_it_was_answered_gets_the_auxiliary_when_it_returns(tiny, monkeypatch):
    """With --align-at start it comes as a reply, and a client that fails later in the round has lost it."""
    from fsl_sage.roles.client import Client

    upload, held = Client.upload, {}

    def spoilt(self, parts):
        held[self.id, self.round] = {name: x.clone() for name, x in self._parts["auxiliary"].weights().items()}
        sent = upload(self, parts)
        if self.id == 1 and self.round == 0:
            next(iter(sent["client"].values())).fill_(float("nan"))
        return sent

    monkeypatch.setattr(Client, "upload", spoilt)
    changes = {"align_at": "start", "align_every": 5, "alignment": {"scope": "pooled"}}
    result = run(tiny(rounds=2, on_client_failure="drop", **changes))
    assert [line["missing"] for line in result.metrics] == [[1], []]
    assert all(torch.equal(tensor, held[0, 1][name]) for name, tensor in held[1, 1].items())
    paid = [entry for entry in RunDirectory(result.directory).ledger() if entry.client == 1 and entry.kind == AUXILIARY]
    assert [entry.round for entry in paid] == [0, 1]


@pytest.mark.parametrize("part", ["client", "server"])
def test_a_global_model_that_is_no_number_never_reaches_a_checkpoint(tiny, monkeypatch, part):
    """As when the average of finite weights overflows, or a step of the S-server does."""
    from fsl_sage.experiment import Federation

    weights = Federation.weights

    def spoilt(self):
        parts = weights(self)
        if self._round == 1:
            parts[part] = {name: tensor * float("inf") for name, tensor in parts[part].items()}
        return parts

    config = tiny(rounds=3)
    monkeypatch.setattr(Federation, "weights", spoilt)
    with pytest.raises(TrainingError, match=rf"'{part}/\S+' became infinite or NaN in round 1"):
        run(config)
    assert len(RunDirectory(config.out).metrics()) == 1
    monkeypatch.undo()
    assert_same_run(run(tiny(rounds=3)).directory, resume(config.out).directory)


# BatchNorm


def test_local_statistics_do_not_travel(tiny):
    average, local = (run(tiny(algorithm="fedavg", model={"batch_norm": policy})) for policy in ("average", "local"))
    travelling = [result.metrics[-1]["bytes_paper"] for result in (average, local)]
    state = load_tensors(average.model_file)[0]
    statistics = [t for n, t in state.items() if n.split(".")[-1].startswith(("running_", "num_batches"))]
    amount = sum(tensor.numel() * tensor.element_size() for tensor in statistics)
    assert travelling[0] - travelling[1] == 2 * 2 * 3 * amount  # up and down, two rounds, three clients
    assert load_tensors(local.model_file)[0].keys() == state.keys()


def test_local_statistics_are_kept_by_each_client_and_resumed(tiny, monkeypatch):
    whole = run(tiny(model={"batch_norm": "local"})).directory
    config = tiny(model={"batch_norm": "local"})
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


def test_counters_keep_the_largest(tiny):
    result = run(tiny(algorithm="fedavg", clients=4, rounds=1))  # 38 and 37 images: 3 steps of 16 each
    state = load_tensors(result.model_file)[0]
    counters = {int(tensor) for name, tensor in state.items() if name.endswith("num_batches_tracked")}
    assert counters == {3}


def test_group_norm_in_its_place(tiny):
    state = load_tensors(run(tiny(model={"batch_norm": "group"}, rounds=1)).model_file)[0]
    assert not any("running_mean" in name for name in state)


# Data order and settings


def test_every_partition_runs(tiny):
    for data in ({"partition": "iid"}, {"partition": "dirichlet", "alpha": 0.1}, {"partition": "shards"}):
        assert run(tiny(rounds=1, data=data)).metrics


def test_an_alpha_that_no_partition_goes_by_is_told(tiny):
    with pytest.warns(RunWarning, match=r"--data\.alpha 0\.1 has no effect: the partition is shards"):
        run(tiny(rounds=1, data={"partition": "shards", "alpha": 0.1}))


def test_a_fixed_number_of_local_steps(tiny):
    config = tiny(algorithm="splitfed-ss", local_steps=5, rounds=1)  # 50 images a client: 4 steps an epoch
    labels = [e for e in RunDirectory(run(config).directory).ledger() if e.kind == "labels"]
    assert {entry.bytes for entry in labels} == {8 * (50 + 16)}


@pytest.mark.parametrize("order", ["interleaved", "blocked"])
@pytest.mark.parametrize("algorithm", ["cse-fsl", "splitfed-ss"])
def test_orders(tiny, order, algorithm):
    assert run(tiny(algorithm=algorithm, order=order, rounds=1)).metrics


def test_orders_differ(tiny):
    losses = {run(tiny(rounds=1, order=order)).metrics[0]["train_loss"] for order in ("interleaved", "blocked")}
    assert len(losses) == 2


def aligned_auxiliaries(directory):
    """By client, what waits for it after the last round, from the kept checkpoint."""
    prefix = "post/"
    tensors, _ = load_tensors(directory / "checkpoint.safetensors")
    kept = {path.removeprefix(prefix): tensor for path, tensor in tensors.items() if path.startswith(prefix)}
    return list(by_client(kept).values())


def test_pooled_alignment_from_the_servers_blocks(tiny):
    """One auxiliary for all clients, and a copy of the server's own blocks where names and shapes agree."""
    config = tiny(alignment={"scope": "pooled", "start": "server", "batch_size": 24}, keep_checkpoint=True)
    result = run(config)
    assert all(line["aligned"] for line in result.metrics)
    aligned = aligned_auxiliaries(result.directory)
    assert len(aligned) == 3
    assert all(torch.equal(x, other[name]) for other in aligned[1:] for name, x in aligned[0].items())


def test_each_client_gets_its_own_auxiliary(tiny):
    config = tiny(alignment={"scope": "client", "start": "previous"}, keep_checkpoint=True)
    one, other, _ = aligned_auxiliaries(run(config).directory)
    assert any(not torch.equal(x, other[name]) for name, x in one.items())


def test_schedules_run(tiny):
    constant, cosine = (run(tiny(optimizer={"schedule": s})).metrics for s in ("constant", "cosine"))
    assert constant[1]["test_loss"] != cosine[1]["test_loss"]


def test_bf16_moves_half_the_smashed_data_and_has_the_same_bits_again(tiny):
    plain, brief, again = (run(tiny(precision=precision)) for precision in ("float32", "bf16", "bf16"))
    assert np.isfinite(brief.metrics[-1]["test_loss"])
    assert brief.metrics[-1]["test_loss"] != plain.metrics[-1]["test_loss"]
    assert brief.metrics[-1]["test_loss"] == again.metrics[-1]["test_loss"]
    sent = [
        sum(entry.bytes for entry in RunDirectory(result.directory).ledger() if entry.kind == ACTIVATIONS)
        for result in (plain, brief)
    ]
    assert sent[0] == 2 * sent[1] > 0


def test_bf16_warns_where_it_does_not_pay(tiny, monkeypatch):
    able = {"architecture": "x86_64", "avx512_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    with pytest.warns(RunWarning, match="bf16 does not pay here: this CPU has no products of bfloat16 numbers"):
        run(tiny(precision="bf16", rounds=1))
    able["avx512_bf16"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)
        run(tiny(precision="bf16", rounds=1))


class Noisy(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.rate = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8)), 0.3
        self.second = nn.Linear(8, classes)

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x), self.rate, self.training))


def noisy(classes, channels):
    return Noisy(classes)


def test_draws_that_no_module_tells_of_are_seeded_too(tiny):
    """A dropout that is a function: the same bits again, whatever the workers."""
    model = {"name": "tests.test_experiment:noisy", "cut": "first", "auxiliary": "linear"}
    first, again = (run(tiny(model=model, workers=workers)).metrics for workers in (1, 3))
    assert without_times(first) == without_times(again)
    assert make_setup(tiny(model=model)).settings.draws
    assert not make_setup(tiny()).settings.draws


def test_a_model_with_another_number_of_outputs_than_classes_is_told(tiny):
    model = {"name": "tests.test_experiment:too_many", "cut": "first", "auxiliary": "full"}
    with pytest.raises((InputError, TrainingError), match=r"gives \[\d+, 1000\] for a batch, .* of 10 classes"):
        run(tiny(model=model))


def too_many(classes, channels):
    return Noisy(1000)


# What is a client's own


@pytest.mark.parametrize(
    "changes",
    [{"algorithm": "cse-fsl"}, {"algorithm": "heron-sfl"}, {"algorithm": "fsl-sage", "warm_start": True}],
    ids=lambda changes: changes["algorithm"],
)
def test_statistics_of_an_averaged_auxiliary_may_stay_local(tiny, changes):
    assert run(tiny(rounds=2, align_every=1, model={"batch_norm": "local"}, **changes)).metrics


@pytest.mark.parametrize("cohort", [1.0, 0.67])
def test_a_score_with_local_statistics_is_that_of_the_averaged_weights(tiny, monkeypatch, cohort):
    """In rounds without an average, and of clients that were away, it was that of each client's own weights."""
    rounds = []
    score, evaluate = Federation._evaluate, LocalEngine.evaluate
    monkeypatch.setattr(Federation, "_evaluate", lambda self, weights: (rounds.append([]), score(self, weights))[1])
    monkeypatch.setattr(
        LocalEngine, "evaluate", lambda self, parts: (rounds[-1].append(parts["client"]), evaluate(self, parts))[1]
    )
    run(tiny(algorithm="adaptsfl", average_every=2, rounds=3, cohort=cohort, model={"batch_norm": "local"}))
    assert len(rounds) == 3
    for first, *others in rounds:
        own = {name for name in first if "running" in name or "num_batches" in name}
        assert own
        assert others
        assert all(torch.equal(first[name], other[name]) for other in others for name in first.keys() - own)


def test_an_algorithm_without_auxiliary_runs_where_the_cut_allows_none(tiny):
    for algorithm in ("fedavg", "splitfed-ss"):
        assert run(tiny(algorithm=algorithm, rounds=1, model={"name": "small-cnn", "cut": "block3.bn"})).metrics
    with pytest.raises(SplitError, match="the server has no blocks but its head"):
        run(tiny(rounds=1, model={"name": "small-cnn", "cut": "block3.bn"}))


def test_a_figure_that_fails_costs_a_run_nothing_else(tiny, monkeypatch):
    """It ended the run after its last round, without a model and without a result."""

    def fails(*given):
        raise ValueError("no such colour")

    for name in ("classes_figure", "score_figure"):
        monkeypatch.setattr(figures, name, fails)
    config = tiny(algorithm="fedavg", rounds=1)
    with pytest.warns(RunWarning) as said:
        run(config)
    for name in ("classes", "accuracy"):
        words = f"{name}.png could not be drawn: ValueError: no such colour (test_experiment.py, line"
        assert any(str(each.message).startswith(words) for each in said)
    assert RunDirectory(config.out).finished()
    assert (config.out / "model.safetensors").exists()

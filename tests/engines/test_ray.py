"""Runs on Ray: the numbers of the local engine, whatever the number of workers, and whoever dies."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("ray")

import ray

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.config import Config, from_dict
from fsl_sage.engines.base import ClientError
from fsl_sage.engines.ray import RayEngine, pool
from fsl_sage.engines.ray.cluster import Crew, Layout, connect, start_crew
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, play, resume, run
from fsl_sage.experiment.setup import make_setup
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.write import ReportOptions, write_report
from tests.conftest import merge
from tests.engines.faulty import KillsEveryWorker, KillsItsWorker, KillsServer, Raises
from tests.own_data import OWN_DATA, SMALL
from tests.test_experiment import assert_same_run, interrupt_after
from tests.texts import save_all

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

CODECS = {"activations": "cached-int4", "update": "int4", "weights": "int4", "auxiliary": "int4:nearest+zstd"}
NAMES = ["fsl-sage", "cse-fsl", "splitfed-ms", "splitfed-ss", "fedavg", "heron-sfl", "fedgkt", "locfedmix-sl"]


@pytest.fixture(scope="module")
def crew():
    """One Ray instance and its actors for all runs of this module: they take long to start."""
    connect(Config(workers=4))
    yield start_crew(Layout(workers=4, cpus=1, gpus=0))
    ray.shutdown()


@pytest.fixture
def on_ray(crew):
    """Runs on some of the crew's workers."""

    def run_on(config, workers=2):
        lent = Crew(crew.workers[:workers], crew.server)
        build = partial(build_on, lent)
        return play(RunDirectory.create(config), config, [], build=build)

    return run_on


def build_on(crew, directory, config, problem):
    setup = make_setup(config, problem)
    return Federation(setup, RayEngine(setup, crew))


# Four clients of unequal sizes, so that they take different numbers of steps; checkpoints are kept.
USUAL = {"clients": 4, "local_epochs": 2, "keep_checkpoint": True, "data": {"partition": "dirichlet"}}


@pytest.fixture
def small(tiny):
    def make(**changes):
        return tiny(**merge(USUAL, changes))

    return make


@pytest.fixture
def local_run(finished):
    """The directory of such a run on the local engine; each is made once."""

    def made(**changes):
        return finished(**merge(USUAL, changes))

    return made


@pytest.fixture
def assert_like_local(local_run):
    """That a run on Ray records what the local engine does, and that their last checkpoints hold the same tensors."""

    def compare(directory, **changes):
        local = local_run(**changes)
        assert_same_run(directory, local)
        one, other = (load_tensors(RunDirectory(path).checkpoint_file)[0] for path in (directory, local))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)

    return compare


# The same numbers


@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [
        *((name, 2) for name in NAMES),
        *((name, n) for n in (1, 4) for name in ("fsl-sage", "splitfed-ss", "splitfed-ms")),
    ],
)
def test_bits_are_those_of_the_local_engine(small, on_ray, assert_like_local, algorithm, workers):
    directory = on_ray(small(algorithm=algorithm, engine="ray"), workers).directory
    assert_like_local(directory, algorithm=algorithm)


@pytest.mark.parametrize(
    "changes",
    [
        # Absent clients, a warm start, everything held on disk until its turn.
        {"algorithm": "fsl-sage", "cohort": 0.6, "rounds": 3, "warm_start": True, "ray_spill_mib": 0},
        {"algorithm": "fsl-sage", "order": "blocked", "model": {"batch_norm": "local"}},
        {"algorithm": "fsl-sage", "alignment": {"scope": "pooled", "start": "server"}},
        {"algorithm": "splitfed-ss", "order": "blocked", "cohort": 0.6},
        {"align_at": "start", "cohort": 0.6, "rounds": 3, "local_auxiliary": True},
        {"align_at": "start", "alignment": {"scope": "client", "optimizer_state": "kept"}},
        {"algorithm": "splitfed-ss", "joint_step": True},
        {"algorithm": "sl", "alternate": True, "hands_on_optimizer": True, "cohort": 0.6, "local_epochs": 1},
        {"algorithm": "local-loss", "cohort": 0.6},
        {"algorithm": "cpsl", "draw_clusters": True, "hands_on_optimizer": True},
        {
            **{"algorithm": "adaptsfl", "average_every": 2, "cohort": 0.6, "rounds": 5, "local_epochs": 1},
            **{"cuts": ["block1", "block3", "block2", "block1"], "client_optimizer": "reset"},
        },
        {
            "algorithm": "splitfed-ms",
            "cohort": 0.6,
            "rounds": 3,
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.0},
            "averaging": {"control_variates": True, "proximal": 0.1, "optimizer": "yogi"},
        },
        {"algorithm": "splitfed-ms", "averaging": {"rule": "clipped"}},
        {"algorithm": "fsl-sage", "client_optimizer": "average", "cohort": 0.6, "rounds": 3},
        {"codec": CODECS, "cohort": 0.6, "rounds": 3},
        {"codec": {**CODECS, "gradients": "int8+zstd"}, "algorithm": "splitfed-ss"},
        {"model": {"auxiliary": "ridge:9"}, "hold": 0.5, "alignment": {"scope": "client"}, "cohort": 0.6, "rounds": 3},
    ],
    ids=[
        *("cohort", "local statistics", "pooled", "blocked", "aligned at start", "by client at start"),
        *("joint step", "sl", "local-loss", "cpsl", "adaptsfl", "corrections", "clipped"),
        *("averaged optimizers", "codecs", "codecs, waiting", "ridge"),
    ],
)
def test_other_settings_too(small, on_ray, assert_like_local, changes):
    directory = on_ray(small(engine="ray", **changes)).directory
    assert_like_local(directory, **changes)


def test_language_models_too(tiny, on_ray, tmp_path):
    pytest.importorskip("peft")
    options = merge(save_all(tmp_path), {"algorithm": "fsl-sage", "rounds": 2, "clients": 3})
    assert_same_run(on_ray(tiny(engine="ray", **options)).directory, run(tiny(**options)).directory)


def test_own_data_too(crew, on_ray, tmp_path, monkeypatch):
    for kind, make in OWN_DATA.items():
        (tmp_path / kind).mkdir()
        values = {**SMALL, **make(tmp_path / kind), "algorithm": "fsl-sage"}
        here, there = (
            from_dict({**values, "engine": engine, "out": str(tmp_path / "runs" / f"{kind}-{engine}")})
            for engine in ("local", "ray")
        )
        run(here)
        interrupt_after(monkeypatch, 2)
        with pytest.raises(KeyboardInterrupt):
            on_ray(there)
        monkeypatch.undo()
        play(RunDirectory(there.out), there, [], build=partial(build_on, crew))
        assert_same_run(there.out, here.out)
    report = write_report(tmp_path / "runs", tmp_path / "report", ReportOptions())
    assert "best-accuracy" in {table.name for table in report.tables}


def test_a_run_may_go_on_upon_the_other_engine(small, crew, assert_like_local, monkeypatch):
    changes = {"algorithm": "fsl-sage", "rounds": 3, "cohort": 0.6}
    config = small(engine="ray", **changes)
    for rounds, build in ((1, partial(build_on, crew)), (2, None), (3, partial(build_on, crew))):
        if rounds == 1:
            directory = RunDirectory.create(config)
        interrupt_after(monkeypatch, rounds)
        try:
            play(directory, config if build else replace(config, engine="local"), [], build=build)
        except KeyboardInterrupt:
            assert len(directory.metrics()) == rounds < 3
        monkeypatch.undo()
    assert_like_local(config.out, **changes)


def test_only_what_decides_no_number_may_change_when_a_run_goes_on(small, monkeypatch):
    config = small()
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    with pytest.raises(InputError, match="--batch-size cannot change"):
        resume(config.out, batch_size=8)


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ms"])
def test_as_they_come_moves_the_same_bytes(small, on_ray, local_run, algorithm):
    local = local_run(algorithm=algorithm)
    other = on_ray(small(algorithm=algorithm, engine="ray", order="arrival")).directory
    assert (local / "ledger.csv").read_bytes() == (other / "ledger.csv").read_bytes()
    if algorithm == "splitfed-ms":  # every client has a server part of its own: the order changes nothing
        assert_same_run(local, other)


# Faults


def with_fault(monkeypatch, algorithm, fault, marker=None):
    monkeypatch.setitem(ALGORITHMS, algorithm, fault(ALGORITHMS[algorithm], marker))


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ms", "splitfed-ss"])
def test_a_worker_killed_in_a_round(small, on_ray, assert_like_local, monkeypatch, tmp_path, algorithm):
    marker = tmp_path / "killed"
    with_fault(monkeypatch, algorithm, KillsItsWorker, marker)
    directory = on_ray(small(algorithm=algorithm, engine="ray")).directory
    assert marker.exists()
    monkeypatch.undo()
    assert_like_local(directory, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss"])
def test_the_s_server_killed_in_a_round(crew, small, assert_like_local, monkeypatch, tmp_path, algorithm):
    marker = tmp_path / "killed"
    with_fault(monkeypatch, algorithm, KillsServer, marker)

    def build(directory, config, problem):  # the crew's own S-server is needed for other tests
        server = start_crew(Layout(0, cpus=1, gpus=0)).server
        return build_on(Crew(crew.workers[:2], server), directory, config, problem)

    config = small(algorithm=algorithm, engine="ray")
    play(RunDirectory.create(config), config, [], build=build)
    assert marker.exists()
    monkeypatch.undo()
    assert_like_local(config.out, algorithm=algorithm)


def test_the_driver_killed(small, crew, assert_like_local):
    changes = {"algorithm": "fsl-sage", "rounds": 6}
    config = small(engine="ray", workers=1, **changes)
    # Another process starts from the configuration that a run writes down first, on a Ray instance of its own.
    directory = RunDirectory.create(config)
    command = [sys.executable, "-m", "fsl_sage", "resume", str(config.out)]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 240
    while len(directory.metrics()) < 2:
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert not directory.finished()
    play(directory, config, [], build=partial(build_on, crew))
    assert_like_local(config.out, **changes)


@pytest.mark.parametrize("engine", ["ray", "local"])
@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss"])
def test_a_client_whose_code_raises_stops_the_run(small, on_ray, monkeypatch, engine, algorithm):
    with_fault(monkeypatch, algorithm, Raises)
    with pytest.raises(ClientError, match="Client 1 failed in round 1: ValueError: the disk is full") as failure:
        (on_ray if engine == "ray" else run)(small(algorithm=algorithm, engine=engine))
    assert "in strike" in failure.value.__notes__[0]


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss", "splitfed-ms"])
def test_a_client_whose_code_raises_is_dropped(small, on_ray, monkeypatch, algorithm):
    with_fault(monkeypatch, algorithm, Raises)
    changes = {"algorithm": algorithm, "rounds": 3, "on_client_failure": "drop"}
    runs = on_ray(small(engine="ray", **changes)), run(small(**changes))
    for result in runs:
        assert [line["missing"] for line in result.metrics] == [[], [1], []]
        assert result.metrics[1]["failures"] == {"1": "ValueError: the disk is full (faulty.py, line 56)"}
        assert "failures" not in result.metrics[2]
    assert_same_run(*(result.directory for result in runs))


def test_a_client_that_kills_every_worker_is_dropped(small, on_ray, monkeypatch):
    with_fault(monkeypatch, "fsl-sage", KillsEveryWorker)
    monkeypatch.setattr(pool, "TRIES", 2)
    result = on_ray(small(engine="ray", on_client_failure="drop"))
    assert [line["missing"] for line in result.metrics] == [[], [1]]
    assert "its worker died 2 times" in result.metrics[1]["failures"]["1"]

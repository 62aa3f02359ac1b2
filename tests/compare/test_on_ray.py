"""A comparison over a Ray cluster: whole runs on its machines, their files here, and no run lost with a machine."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray
from ray.exceptions import RayActorError

from fsl_sage.compare import on_ray
from fsl_sage.compare.grid import Grid, plan_runs
from fsl_sage.compare.grid_run import Watcher
from fsl_sage.compare.on_ray import RemoteRun, Seat, read_files, write_files
from fsl_sage.compare.placement import place
from fsl_sage.compare.scheduler import prepare, run_grid
from fsl_sage.config import Config, from_dict, from_file, load_preset
from fsl_sage.errors import InputError
from fsl_sage.experiment import run
from fsl_sage.records.run_directory import RunDirectory
from tests.compare.small_grid import PRESET
from tests.own_data import OWN_DATA, SMALL
from tests.ray_nodes import two_nodes
from tests.test_experiment import assert_same_run


@pytest.fixture(scope="module")
def address():
    with two_nodes(cpus=1) as address:
        yield address


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_runs_over_two_nodes_one_of_which_dies(tmp_path, address):
    preset = tmp_path / "preset.toml"
    preset.write_text(PRESET)
    config = replace(load_preset(preset), rounds=20, engine="ray", ray_address=address)
    plain = replace(config, engine="local", ray_address=None)
    runs = prepare(plan_runs(plain, Grid(algorithms=("cse-fsl",), seeds=(1, 2))), tmp_path / "grid")
    started, nodes, killed = [], set(), []

    class Watching(Watcher):
        """Kills the place of a run, with kill -9, when its first round has come back."""

        def moved(self, run):
            seats = [running._seat for running in started]
            if len(seats) == 2 and not killed:
                nodes.update(ray.get([seat.__ray_call__.remote(where) for seat in seats]))
                killed.append(ray.get(seats[runs.index(run)].__ray_call__.remote(lambda self: os.getpid())))
                os.kill(killed[0], signal.SIGKILL)

    with place(config, len(runs), None) as (at_once, workers, start):
        assert (at_once, workers) == (2, 1)

        def note(run, workers):
            started.append(start(run, workers))
            return started[-1]

        run_grid(runs, at_once, workers, note, Watching())
    assert not ray.is_initialized()
    assert len(nodes) == 2
    assert sorted(running._tries for running in started) == [1, 2]
    assert [run.state for run in runs] == ["finished", "finished"]
    for each in runs:
        alone = run(replace(each.plan.config, out=tmp_path / "alone" / each.plan.name)).directory
        assert_same_run(each.directory.path, alone)
        names = {file.name for file in each.directory.path.iterdir()}
        assert names == {file.name for file in alone.iterdir()} | {"run.log"}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("kind", ["labels", "datasets"])
def test_data_of_ones_own_are_compared_over_a_cluster(tmp_path, address, kind):
    values = {**SMALL, "rounds": 1, **OWN_DATA[kind](tmp_path)}
    plain = from_file(from_dict(values), "tests", of_several=True)
    runs = prepare(plan_runs(plain, Grid(algorithms=("cse-fsl",), seeds=(1,))), tmp_path / "grid")
    with place(replace(plain, engine="ray", ray_address=address), 1, None) as (at_once, workers, start):
        run_grid(runs, at_once, workers, start, Watcher())
    assert [run.state for run in runs] == ["finished"]
    alone = run(replace(runs[0].plan.config, out=tmp_path / "alone")).directory
    assert_same_run(runs[0].directory.path, alone)


def test_a_run_that_is_lost_after_its_end_is_finished(tiny, monkeypatch):
    """Its machine went when all had come back but the exit code: to start it again would be an error."""
    directory = RunDirectory(run(tiny(algorithm="fedavg", rounds=1)).directory)

    class Lost:
        start = news = leave = SimpleNamespace(remote=lambda *_: "never answered")

    def get(_):
        raise RayActorError

    monkeypatch.setattr(on_ray.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(on_ray.ray, "kill", lambda _: None)
    monkeypatch.setattr(on_ray.ray, "get", get)
    assert RemoteRun(SimpleNamespace(remote=Lost), directory, 1).poll() == 0


class Silent:
    """A seat that never answers."""

    start = news = leave = SimpleNamespace(remote=lambda *_: "never answered")


def test_a_run_that_is_played_elsewhere_is_locked_here(tiny, monkeypatch):
    directory = RunDirectory.create(tiny())
    monkeypatch.setattr(on_ray.ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr(on_ray.ray, "kill", lambda _: None)
    there = RemoteRun(SimpleNamespace(remote=Silent), RunDirectory(directory.path), 1)
    assert there.poll() is None
    assert directory.is_played()
    second = RemoteRun(SimpleNamespace(remote=Silent), RunDirectory(directory.path), 1)
    assert second.poll() == 2
    assert "is being played by process" in (directory.path / "run.log").read_text()
    second.terminate()
    assert directory.is_played()
    there.terminate()
    assert not directory.is_played()


def test_a_lock_holds_on_its_own_machine(tmp_path):
    write_files(tmp_path, {".lock": b"", "config.json": b"{}"})
    assert read_files(tmp_path) == {"config.json": b"{}"}


def where(self):
    return ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize(
    ("cpus", "gpus", "options", "runs", "jobs", "expected"),
    [
        ([8, 8], 0, {}, 100, None, (16, 1, 0)),
        ([8, 8], 0, {}, 2, None, (2, 8, 0)),
        ([8, 2], 0, {}, 2, None, (2, 2, 0)),  # a share must fit on the smallest machine
        ([8, 8], 0, {"threads": 2}, 100, 3, (3, 2, 0)),
        ([8, 8], 0, {"workers": 3}, 100, None, (4, 3, 0)),
        ([8, 8], 1, {}, 100, None, (2, 1, 1)),
        ([8, 8], 1, {"device": "cpu"}, 100, None, (16, 1, 0)),
        ([8, 8], 1, {"ray_num_gpus": 0.5}, 100, None, (4, 1, 0.5)),
    ],
)
def test_runs_share_the_cluster(monkeypatch, cpus, gpus, options, runs, jobs, expected):
    nodes = [{"Alive": True, "Resources": {"CPU": float(cpu), "GPU": float(gpus)}} for cpu in cpus]
    monkeypatch.setattr(on_ray.ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 99.0}}])
    assert on_ray._fit(Config(**options), runs, jobs) == expected


def test_a_run_that_fits_on_no_machine_is_refused(monkeypatch):
    monkeypatch.setattr(on_ray.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}])
    with pytest.raises(InputError, match=r"--workers 5 with --threads 1 does not fit on a machine .* 4 CPUs"):
        on_ray._fit(Config(workers=5), 1, None)


def test_what_depends_on_other_files_is_read_first_and_written_last(tmp_path, monkeypatch):
    names = ["a.png", "checkpoint.safetensors", "metrics.jsonl", "result.json", "tensorboard/events"]
    files = {name: name.encode() for name in names}
    written = []
    write = on_ray.write_bytes
    monkeypatch.setattr(on_ray, "write_bytes", lambda path, content: (written.append(path.name), write(path, content)))
    write_files(tmp_path, files)
    assert written == ["a.png", "metrics.jsonl", "events", "checkpoint.safetensors", "result.json"]
    (tmp_path / "metrics.jsonl.part").write_bytes(b"half")
    assert list(read_files(tmp_path))[:2] == ["checkpoint.safetensors", "result.json"]
    assert read_files(tmp_path) == files
    write_files(tmp_path, {"a.png": None, "never.there": None})
    assert "a.png" not in read_files(tmp_path)


def test_a_new_checkpoint_brings_everything_along(tmp_path):
    """Else what came before it, between two looks, would be missing beside it."""
    seat = Seat()
    seat._path, seat._process = tmp_path, Ended()
    write_files(tmp_path, {"metrics.jsonl": b"1\n", "checkpoint.safetensors": b"1"})
    seat._known = on_ray._marks(tmp_path)
    assert seat.news() == ({}, 0)
    write_files(tmp_path, {"metrics.jsonl": b"1\n2\n"})
    assert seat.news() == ({"metrics.jsonl": b"1\n2\n"}, 0)
    write_files(tmp_path, {"checkpoint.safetensors": b"2"})
    assert seat.news()[0] == {"metrics.jsonl": b"1\n2\n", "checkpoint.safetensors": b"2"}
    write_files(tmp_path, {"checkpoint.safetensors": None})
    assert seat.news()[0] == {"checkpoint.safetensors": None}


class Ended:
    def poll(self):
        return 0


def test_files_go_when_what_replaces_them_is_there(tmp_path, monkeypatch):
    """A kill in between must not leave a checkpoint that names files which are gone, nor neither of two results."""
    write_files(tmp_path, {"clients/0-old": b"old", "checkpoint.safetensors": b"names 0-old"})

    class KillError(Exception):
        pass

    def killed(path, content):
        raise KillError

    monkeypatch.setattr(on_ray, "write_bytes", killed)
    for news in (
        {"clients/0-old": None, "clients/0-new": b"new", "checkpoint.safetensors": b"names 0-new"},
        {"clients/0-old": None, "checkpoint.safetensors": None, "result.json": b"{}"},
    ):
        with pytest.raises(KillError):
            write_files(tmp_path, news)
        assert read_files(tmp_path) == {"clients/0-old": b"old", "checkpoint.safetensors": b"names 0-old"}


def test_files_that_were_read_while_a_checkpoint_came_wait(tmp_path, monkeypatch):
    class Going:
        def poll(self):
            return None

    seat = Seat()
    seat._path, seat._process, seat._known = tmp_path, Going(), {}
    write_files(tmp_path, {"clients/0-a": b"a", "checkpoint.safetensors": b"names a"})
    read = on_ray.read_files

    def slowly(path, names=None):
        files = read(path, names)
        write_files(path, {"clients/0-a": None, "clients/0-b": b"b", "checkpoint.safetensors": b"it names b"})
        return files

    monkeypatch.setattr(on_ray, "read_files", slowly)
    assert seat.news() == ({}, None)
    monkeypatch.setattr(on_ray, "read_files", read)
    assert seat.news() == ({"clients/0-b": b"b", "checkpoint.safetensors": b"it names b"}, None)

"""What Ray leaves behind when its driver is killed: ended by the next run, and nothing else is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from fsl_sage.engines.ray import leftovers
from fsl_sage.engines.ray.leftovers import _folder, _identity, _lives, end_leftovers, remembered

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(leftovers.tempfile, "tempdir", None)


@pytest.fixture
def sleepers():
    """Starts processes that wait, and ends them."""
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_helpers_of_a_living_driver_stay(sleepers):
    earlier = sleepers()
    with remembered():
        helper = sleepers()
    (file,) = _folder().iterdir()
    assert json.loads(file.read_text()) == [_identity(helper.pid)]
    assert end_leftovers() == []
    assert _lives(_identity(helper.pid))
    assert earlier.poll() is None


def test_helpers_of_a_driver_that_is_gone_are_ended_once(sleepers):
    with remembered():
        helper = sleepers()
    other, who = sleepers(), _identity(helper.pid)
    (file,) = _folder().iterdir()
    file.rename(file.with_name(f"{os.getpid()}-0.json"))  # of a driver that had this number before
    assert end_leftovers() == [who]
    assert helper.wait() == -9
    assert other.poll() is None
    assert end_leftovers() == []


def test_a_process_that_took_the_number_of_a_helper_stays(sleepers):
    other = sleepers()
    _folder().mkdir(mode=0o700)
    (_folder() / "1-0.json").write_text(json.dumps([f"{other.pid}-0", "x", 7, "²-1", ""]))
    (_folder() / "2-0.json").write_text("[" * 9)
    assert end_leftovers() == []
    assert other.poll() is None


def test_what_is_not_a_list_of_ours_stays(tmp_path, sleepers):
    """A link in the place of the folder, and files of other names in it."""
    helper, project = sleepers(), tmp_path / "project"
    who = _identity(helper.pid)
    project.mkdir()
    names = {"package.json", "1-0.json", "x-1.json", "1-0.json.json"}
    for name in names:
        (project / name).write_text(json.dumps([who]))
    _folder().symlink_to(project)
    with remembered():
        sleepers()
    assert end_leftovers() == []
    assert {file.name for file in project.iterdir()} == names
    _folder().unlink()
    project.rename(_folder())
    assert end_leftovers() == [who]
    assert {file.name for file in _folder().iterdir()} == names - {"1-0.json"}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_next_run_ends_what_a_killed_driver_left():
    """Ray's own agents."""
    start = "from fsl_sage.config import Config; from fsl_sage.engines.ray.cluster import connect; "
    start += "connect(Config(engine='ray', workers=1)); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_TMPDIR": "/tmp"},
    ) as process:
        assert process.stdout.readline() == "up\n"
        helpers = json.loads((_folder() / f"{_identity(process.pid)}.json").read_text())
        process.kill()
        process.wait()
    assert any(_lives(helper) for helper in helpers)
    end_leftovers()
    while any(_lives(helper) for helper in helpers):
        os.sched_yield()

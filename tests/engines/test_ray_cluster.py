"""Two nodes on this machine, by Ray's own utility for tests."""

import os
import re
import socket
import subprocess
import sys

import pytest

pytest.importorskip("ray")

import ray

from fsl_sage.engines.ray import RayEngine
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, play, run
from fsl_sage.experiment.setup import make_setup
from fsl_sage.records.run_directory import RunDirectory
from tests.ray_nodes import two_nodes
from tests.test_experiment import assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def address():
    with two_nodes(cpus=2) as address:
        yield address


def where(workbench, settings, shared, item):
    return ray.get_runtime_context().get_node_id()


def test_a_run_on_two_nodes(tiny, address):
    config = tiny(clients=4, engine="ray", workers=4, ray_address=address)
    nodes = []

    def build(directory, config, problem):
        setup = make_setup(config, problem)
        engine = RayEngine(setup)
        nodes.extend(engine._pool.spread(where, None, range(40)))
        return Federation(setup, engine)

    play(RunDirectory.create(config), config, [], build=build)
    assert len(set(nodes)) == 2
    assert not ray.is_initialized()
    assert_same_run(config.out, run(tiny(clients=4)).directory)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:many"])
def test_an_address_where_nobody_is(tiny, address):
    with pytest.raises(InputError, match=f"--ray-address {re.escape(address)} cannot be reached"):
        run(tiny(engine="ray", ray_address=address))


def test_a_cluster_that_asks_for_a_token(tmp_path):
    """Ray looks for the token before it says a word to the cluster, so anything that listens will do."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        options = ["run", "--engine", "ray", "--ray-address", address, "--out", str(tmp_path / "run")]
        command = [sys.executable, "-m", "fsl_sage", *options, "--model.name", "small-cnn"]
        environment = {**given, "RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert f"--ray-address {address} asks for a token, and there is none here" in ended.stderr
    assert not (tmp_path / "run").exists()

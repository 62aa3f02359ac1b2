"""Real federations on loopback: SuperLink, SuperNodes, TLS, keys, and the faults that an operator will meet.

One federation serves several runs. Everything that a test starts, it ends by process id.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fsl_sage.deploy.app import agree, write_sites
from fsl_sage.deploy.certificates import write_node_key, write_server_files
from fsl_sage.deploy.processes import (
    ENVIRONMENT,
    HOST,
    NAME,
    free_port,
    node_command,
    superlink_command,
)
from fsl_sage.experiment import run
from fsl_sage.records.run_directory import RunDirectory

from ..conftest import tiny_config
from ..engines.test_flower import Deployment, assert_same_run
from .cutting_proxy import CuttingProxy
from .prestarted import ForkingFederation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("federation")]

CLIENT_APP = """\
from pathlib import Path

from fsl_sage.deploy.client_app import make_client_app
from tests.deploy.misbehaviour import misbehave

app = make_client_app(Path(__file__).with_name("config.json"), [misbehave])
"""

SERVER_APP = """\
import os
from pathlib import Path

from fsl_sage.deploy.server_app import make_server_app

Path({pid!r}).write_text(str(os.getpid()))
app = make_server_app(Path(__file__).with_name("config.json"))
"""


class Nodes(ForkingFederation):
    """The federation of this file: its apps' processes are forked, its nodes misbehave as planned."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.sites: list[Path] = []
        self.starts = [0, 0, 0]

    def plan(self, actions: dict[str, str]) -> None:
        for old in [*self.directory.glob("at-*"), *self.directory.glob("go-*")]:
            old.unlink()
        (self.directory / "plan.json").write_text(json.dumps(actions))

    def reached(self, t: int, client: int) -> int:
        """Wait until a client is where the plan has something for it; the process id of its ClientApp."""
        marker = self.directory / f"at-{t}-{client}"
        self.wait(marker.exists, f"client {client} in round {t}")
        return int(marker.read_text())

    def release(self, t: int, client: int) -> None:
        (self.directory / f"go-{t}-{client}").touch()

    def wait(self, happened, what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.log('apps')[-4000:]}"
            time.sleep(0.1)

    def ensure(self, clients) -> None:
        """These nodes are running and connected."""
        for client in clients:
            if f"node-{client}" not in self._running:
                self.start_node(client, self.sites[client])
                self.starts[client] += 1
        for client in clients:
            self.connected(client)

    def connected(self, client: int) -> None:
        there = "SuperNode ID: "
        self.wait(lambda: self.log(f"node-{client}").count(there) == self.starts[client], f"node {client}")

    def run(self, deployment: Deployment, **options) -> None:
        """`flwr run`; returns when the run has started."""
        options = {"run-directory": f'"{deployment.run_directory}"', **options}
        settings = " ".join(f"{name.replace('_', '-')}={value}" for name, value in options.items())
        self.flwr("run", str(deployment.directory / "app"), NAME, "--run-config", settings)

    def finish(self, deployment: Deployment) -> None:
        """Wait for the end of a run."""
        self.wait(RunDirectory(deployment.run_directory).finished, f"the run in {deployment.run_directory}")

    def server_pid(self) -> int:
        return int((self.directory / "server-pid").read_text())


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Nodes(tmp_path_factory.mktemp("federation") / "nodes") as federation:
        federation.start_superlink()
        federation.register(range(3))
        yield federation


@pytest.fixture
def deploy(nodes, tmp_path):
    def make(**changes) -> Deployment:
        deployment = Deployment(tiny_config({"out": str(tmp_path / "local"), **changes}), tmp_path)
        package = tmp_path / "app" / "fsl_sage_app"
        (package / "client_app.py").write_text(CLIENT_APP)
        (package / "server_app.py").write_text(SERVER_APP.format(pid=str(nodes.directory / "server-pid")))
        deployment.states = nodes.directory / "state"
        if not nodes.sites:  # the same for all runs, for the nodes stay
            shares = agree(deployment.config, None)[1]
            nodes.sites = write_sites(nodes.directory / "sites", shares, deployment.agreement)
        return deployment

    return make


def test_a_late_node_a_killed_client_app_and_a_killed_node(nodes, deploy):
    """The round goes on with who answered, the metrics say who was missing and why, the next round takes them back."""
    deployment = deploy(rounds=4)
    nodes.plan({"0/0": "hold", "1/1": "hang", "1/2": "hang", "2/0": "hold"})
    nodes.ensure([0, 1])
    nodes.run(deployment, join_timeout=1.0, timeout=200.0)
    nodes.reached(0, 0)
    nodes.ensure([2])  # while round 0 is under way
    nodes.release(0, 0)
    os.kill(nodes.reached(1, 1), signal.SIGKILL)
    nodes.reached(1, 2)
    nodes.stop("node-2", signal.SIGKILL)
    nodes.reached(2, 0)
    nodes.ensure([2])  # Flower lets a killed node back when it has noticed, a minute later
    nodes.release(2, 0)
    nodes.finish(deployment)
    metrics = deployment.metrics()
    assert [line["missing"] for line in metrics] == [[2], [1, 2], [2], []]
    assert metrics[0]["failures"] == metrics[2]["failures"] == {"2": "it is not connected"}
    assert metrics[1]["failures"]["1"] == "ClientApp stopped responding."
    assert "Node Unavailable" in metrics[1]["failures"]["2"]
    assert all(line["rejected"] == {} for line in metrics)


def test_hostile_and_late_replies(nodes, deploy):
    """They change nothing: the run is the one in which those clients had been silent in those rounds."""
    deployment = deploy(rounds=3)
    plan = {"0/1": "dtype", "0/2": "nan", "1/0": "hold", "1/1": "oversized", "2/1": "label too high", "2/2": "replay"}
    nodes.plan(plan)
    nodes.ensure(range(3))
    nodes.run(deployment, timeout=30.0)
    nodes.wait(lambda: deployment.run_directory.exists() and len(deployment.metrics()) == 2, "the end of round 1")
    nodes.release(1, 0)
    nodes.finish(deployment)
    metrics = deployment.metrics()
    assert [line["missing"] for line in metrics] == [[1, 2], [0, 1], [1, 2]]
    assert "torch.float64 instead of torch.float32" in metrics[0]["rejected"]["1"]
    assert "not finite" in metrics[0]["rejected"]["2"]
    assert metrics[1]["failures"] == {"0": "no reply within 30 s"}
    assert "too large" in metrics[1]["rejected"]["1"]
    assert "labels outside 0 to 9" in metrics[2]["rejected"]["1"]
    assert "its round is 1 instead of 2" in metrics[2]["rejected"]["2"]

    federation, deployment.run_directory = deployment.run_directory, deployment.directory / "silent"
    deployment.states = deployment.directory / "states"

    def silent(client, message, reply):
        return None if f"{message.metadata.group_id}/{client}" in plan else reply

    deployment.serve(deployment.grid(tamper=silent), timeout=0.1)
    assert_same_run(federation, deployment.run_directory)


def test_a_killed_server_is_resumed_by_the_same_command_bit_for_bit(nodes, deploy):
    deployment = deploy(rounds=2)
    nodes.plan({"1/0": "hold"})
    nodes.ensure(range(3))
    nodes.run(deployment)
    nodes.reached(1, 0)
    os.kill(nodes.server_pid(), signal.SIGKILL)
    assert len(deployment.metrics()) == 1
    nodes.release(1, 0)
    nodes.run(deployment)
    nodes.finish(deployment)
    assert_same_run(deployment.run_directory, run(deployment.config).directory)
    for client in range(3):
        nodes.wait(deployment.state(client).model_file.exists, f"the final weights at client {client}")


def test_a_node_whose_key_is_not_registered_cannot_join(nodes):
    write_node_key(nodes.key(7))
    process = nodes.start_node(7, nodes.directory)
    assert process.wait(120) != 0
    assert "Failed to initialize the connection to the SuperLink" in nodes.log("node-7")
    assert "SuperNode ID" not in nodes.log("node-7")


def test_a_node_does_not_trust_a_superlink_of_another_ca(nodes, tmp_path):
    command = node_command(
        f"{HOST}:{nodes.port}",
        write_server_files(tmp_path, [HOST]).ca,
        write_node_key(tmp_path / "key").with_suffix(""),
        free_port(),
        0,
        tmp_path,
        tmp_path,
    )
    process = nodes._start("doubtful", [*command, "--max-retries", "0"])
    assert process.wait(120) != 0
    assert "SSL/TLS handshake error" in nodes.log("doubtful")
    assert "SuperNode ID" not in nodes.log("doubtful")


def test_flower_reports_nothing_looks_nothing_up_and_installs_nothing(nodes):
    assert ENVIRONMENT.items() <= nodes.environment.items()
    assert "--disable-runtime-dependency-installation" in superlink_command(1, nodes.files)
    assert "--allow-runtime-dependency-installation" not in node_command("", Path(), Path(), 1, 0, Path(), Path())


@pytest.mark.parametrize(
    ("model", "size", "every", "times"),
    [
        pytest.param("Middling", 80_000_000, 25_000_000, 3, id="80 MB"),
        pytest.param("Large", 500_000_000, 60_000_000, 6, id="500 MB", marks=pytest.mark.long),
    ],
)
def test_a_first_download_survives_a_connection_that_is_cut_again_and_again(nodes, tmp_path, model, size, every, times):
    """The site goes on where it was, and starts from the weights that were sent: the run is the one without cuts."""
    shares = Deployment(tiny_config({}), tmp_path / "images")
    config = tiny_config(
        {"clients": 1, "rounds": 1, "model": {"name": f"tests.deploy.large_model:{model}", "cut": "scale"}}
    )
    deployment = Deployment(config, tmp_path, shares.sites[:1], shares.agreement.examples[:1])
    proxy = CuttingProxy(nodes.port, every, times)
    try:
        for name in [name for name in nodes._running if name.startswith("node-")]:
            nodes.stop(name)
        nodes.start_node(0, deployment.sites[0], proxy.port, state=deployment.states)
        nodes.run(deployment, timeout=600.0)
        nodes.finish(deployment)
    finally:
        nodes.stop("node-0")
        proxy.close()
    assert proxy.cuts == times
    assert proxy.came > size
    assert [file.stat().st_size for file in (deployment.states / "weights").iterdir()] == [size]
    assert deployment.metrics()[0]["missing"] == []

    federation, deployment.run_directory = deployment.run_directory, tmp_path / "without"
    deployment.states = tmp_path / "other-state"
    deployment.serve(deployment.grid())
    assert_same_run(federation, deployment.run_directory)

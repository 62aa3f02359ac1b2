"""The Flower engine with everything but the network: messages, inspection, states at the nodes, resuming."""

import json
import re
import shutil
from dataclasses import replace
from itertools import count

import httpx
import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fsl_sage.deploy import server_app
from fsl_sage.deploy.agreement import read_agreement, write_agreement
from fsl_sage.deploy.app import agree, write_app, write_sites
from fsl_sage.deploy.client_app import make_client_app
from fsl_sage.deploy.server_app import serve
from fsl_sage.deploy.site import Site
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.flower import courier
from fsl_sage.engines.flower.contents import ABOUT, TENSORS, Assignment, pack, unpack
from fsl_sage.engines.flower.engine import FlowerEngine
from fsl_sage.engines.flower.inspection import Inspector, RejectedError
from fsl_sage.engines.flower.laying import Laying
from fsl_sage.engines.flower.node_state import NodeState
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import run
from fsl_sage.experiment.setup import make_dry_setup
from fsl_sage.problems.images.problem import image_shapes
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.wire.message import nbytes

from ..conftest import tiny_config
from .flower_grid import InProcessGrid
from .hostile import HOSTILE

OPTIONS = {"data": "", "timeout": 2.0, "minimum": 1, "join-timeout": 0.2}
NOT_COMPARED = ("seconds", "elapsed_seconds", "failures", "rejected")


class Deployment:
    """An app, its sites' data, and a server's run directory."""

    def __init__(self, config, directory, sites=None, examples=None, **node):
        """The sites' data are shares of the data set, unless there are some of so many examples already."""
        self.node = node
        self.config = config
        self.directory = directory
        self.agreement, shares = agree(config, examples)
        write_app(directory / "app", config, self.agreement)
        self.sites = sites or write_sites(directory / "sites", shares, self.agreement)
        self.config_file = directory / "app" / "fsl_sage_app" / "config.json"
        self.run_directory = directory / "run"
        self.states = directory / "state"

    def grid(self, clients=None, **options):
        grid = InProcessGrid(make_client_app(self.config_file), **options)
        for client in range(self.config.clients) if clients is None else clients:
            self.join(grid, client)
        return grid

    def join(self, grid, client, name=""):
        return grid.join(client, self.sites[client], self.states, name, **self.node)

    def serve(self, grid, **options):
        options = {**OPTIONS, "run-directory": str(self.run_directory), **options}
        return serve(self.config_file, grid, options)

    def metrics(self):
        return RunDirectory(self.run_directory).metrics()

    def state(self, client):
        run = json.loads((self.run_directory / "federation.json").read_text())["run"]
        return NodeState(self.states, run, client)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Nothing here takes time to arrive."""
    monkeypatch.setattr("fsl_sage.engines.flower.courier.POLL", 0.02)
    monkeypatch.setattr("fsl_sage.engines.flower.engine.POLL", 0.02)


@pytest.fixture
def deploy(tiny, tmp_path):
    return lambda **changes: Deployment(tiny(**changes), tmp_path)


def compared(metrics):
    return [{name: value for name, value in line.items() if name not in NOT_COMPARED} for line in metrics]


def assert_same_run(a, b):
    assert compared(RunDirectory(a).metrics()) == compared(RunDirectory(b).metrics())
    assert (a / "ledger.csv").read_bytes() == (b / "ledger.csv").read_bytes()
    assert_same_numbers(a, b)


def assert_same_numbers(a, b):
    """What was learnt; not what was sent."""
    one, other = (compared(RunDirectory(path).metrics()) for path in (a, b))
    for line in (*one, *other):
        for name in ("bytes_total", "bytes_paper", "bytes_whole_models"):
            line.pop(name)
    assert one == other
    first, second = (load_tensors(path / "model.safetensors")[0] for path in (a, b))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# The same numbers

CODECS = {"activations": "int4", "update": "int4", "weights": "int8", "auxiliary": "int4:nearest", "labels": "smallest"}
AVERAGING = {
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.0},
    "averaging": {"control_variates": True, "proximal": 0.1, "optimizer": "yogi"},
}


COMBINATIONS = {
    "fsl-sage": {"algorithm": "fsl-sage", "align_every": 2, "rounds": 4},
    "warm": {"algorithm": "fsl-sage", "warm_start": True, "align_every": 2, "rounds": 3},
    "lazy": {"algorithm": "lazy-fsl-sage", "align_until": 0, "rounds": 3, "alignment": {"scope": "pooled"}},
    "cse-fsl": {"algorithm": "cse-fsl", "order": "blocked"},
    "fedavg": {"algorithm": "fedavg", "optimizer": {"schedule": "cosine"}, "client_optimizer": "reset"},
    "cohort": {"cohort": 0.67, "rounds": 4, "data": {"partition": "dirichlet", "alpha": 0.5}},
    "smoothing": {"algorithm": "cse-fsl", "optimizer": {"label_smoothing": 0.2, "auxiliary_weight_decay": 0.0}},
    "local-auxiliary": {
        **{"local_auxiliary": True, "rounds": 3, "align_rounds": [1]},
        "alignment": {"optimizer_state": "kept"},
    },
    "float64": {"precision": "float64"},
    "heron-sfl": {"algorithm": "heron-sfl"},
    "local-loss": {
        **{"algorithm": "local-loss", "cohort": 0.67, "rounds": 3},
        "data": {"partition": "dirichlet", "alpha": 0.5},
    },
    "fedavg-averaging": {"algorithm": "fedavg", "cohort": 0.67, "rounds": 4, **AVERAGING},
    "fsl-sage-averaging": {"algorithm": "fsl-sage", "align_every": 2, **AVERAGING},
    "codecs": {"codec": CODECS, "cohort": 0.67, "rounds": 4, "data": {"partition": "dirichlet", "alpha": 0.5}},
    "cached": {"codec": {"preset": "small", "activations": "cached-int4+zstd"}, "align_every": 2, "rounds": 3},
    "ridge": {
        **{"hold": 0.5, "cohort": 0.67, "rounds": 4},
        **{"model": {"auxiliary": "ridge:9"}, "codec": {"auxiliary": "int8"}},
    },
    "averaged-optimizers": {"algorithm": "cse-fsl", "client_optimizer": "average", "cohort": 0.67, "rounds": 3},
    "cosine": {"alignment": {"loss": "cosine"}, "align_every": 2, "rounds": 3},
    "warm-coded": {"warm_start": True, "codec": {"auxiliary": "int8:nearest"}, "align_every": 2, "rounds": 3},
    "warm-coded-client": {
        **{"warm_start": True, "rounds": 3},
        **{"codec": {"auxiliary": "int4"}, "alignment": {"scope": "client"}},
    },
    "bf16": {"precision": "bf16"},
}
QUICK = ("fsl-sage", "cse-fsl", "fedavg", "cohort", "heron-sfl", "fsl-sage-averaging", "codecs", "cosine", "bf16")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMBINATIONS]
)
def test_bits_ledger_and_metrics_are_those_of_the_local_engine(deploy, name):
    deployment = deploy(**COMBINATIONS[name])
    result = deployment.serve(deployment.grid())
    assert_same_run(result.directory, run(deployment.config).directory)


class Noisy(nn.Module):
    """Its dropout is a function, so no module tells of it; and it is in the client's part."""

    def __init__(self, classes, channels):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8)), nn.Linear(8, 8)
        self.last = nn.Linear(8, classes)

    def forward(self, x):
        return self.last(self.second(nn.functional.dropout(self.first(x), 0.3, self.training)))


def test_sites_seed_what_a_model_of_ones_own_draws(deploy):
    model = {"name": "tests.engines.test_flower:Noisy", "cut": "second", "auxiliary": "linear"}
    deployment = deploy(model=model)
    result = deployment.serve(deployment.grid())
    assert_same_run(result.directory, run(deployment.config).directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "fsl-sage", "warm_start": True},
        {"algorithm": "cse-fsl"},
        {"algorithm": "fedavg"},
        {"algorithm": "local-loss"},
        {"algorithm": "fedavg", **AVERAGING},
        {"codec": CODECS},
        {"algorithm": "cse-fsl", "codec": {"preset": "small", "weights": "fp16"}},
        {"model": {"auxiliary": "ridge:9"}, "hold": 0.5},
    ],
    ids=["fsl-sage", "cse-fsl", "fedavg", "local-loss", "controls", "codecs", "codecs of cse-fsl", "ridge"],
)
def test_the_tensors_that_cross_are_what_the_ledger_bills(deploy, changes):
    deployment = deploy(**{"rounds": 3, "align_every": 2, **changes})
    replies = []

    def overhear(client, message, reply):
        replies.append(reply)
        return reply

    grid = deployment.grid(tamper=overhear)
    deployment.serve(grid)
    assert moved(replies) == billed(deployment, "up")
    assert moved(grid.sent) == billed(deployment, "down")


def moved(messages):
    records = [message.content.array_records for message in messages]
    return sum(nbytes(unpack(record[TENSORS])) for record in records if TENSORS in record)


def billed(deployment, way):
    entries = RunDirectory(deployment.run_directory).ledger()
    return sum(entry.bytes for entry in entries if entry.direction == way)


@pytest.mark.parametrize("failed_in", ["0", "1"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        # No auxiliary waits for the client: it gets its first one again.
        pytest.param({"align_rounds": [3]}, marks=pytest.mark.slow),
        {"codec": CODECS},
        pytest.param({"algorithm": "cse-fsl", "codec": {"preset": "small", "weights": "fp16"}}, marks=pytest.mark.slow),
    ],
    ids=["plain", "aligned late", "codecs", "fp16"],
)
def test_what_a_client_gets_again_after_a_failure_is_what_the_ledger_bills(deploy, changes, failed_in):
    deployment = deploy(**{"rounds": 4, "align_every": 2, **changes})

    def lose(client, message, reply):
        return None if (message.metadata.group_id, client) == (failed_in, 2) else reply

    grid = deployment.grid(tamper=lose)
    deployment.serve(grid, timeout=0.1)
    assert [line["missing"] for line in deployment.metrics()].count([2]) == 1
    assert moved(grid.sent) == billed(deployment, "down")


def test_a_client_that_does_not_get_its_foundation_is_billed_nothing(deploy, monkeypatch):
    monkeypatch.setattr(Laying, "send", lambda self, nodes, courier, timeout: {2: "its disk is full"})
    deployment = deploy(rounds=2)
    grid = deployment.grid()
    deployment.serve(grid)
    assert [line["failures"] for line in deployment.metrics()] == [{"2": "its disk is full"}] * 2
    assert {entry.client for entry in RunDirectory(deployment.run_directory).ledger()} == {0, 1}


def test_a_newcomer_gets_one_auxiliary_the_one_that_was_aligned_before_it_came(deploy):
    deployment = deploy(cohort=0.34, rounds=3, align_every=5, seed=1)  # clients 2, 1 and 0 in turn
    grid = deployment.grid()
    deployment.serve(grid)
    sent = [message.content for message in grid.sent if message.metadata.message_type == "train"]
    parts = [{path.rsplit("/", 1)[0] for path in unpack(content.array_records[TENSORS])} for content in sent]
    assert parts == [{"held/client", "held/auxiliary"}, *[{"held/client", "mail/auxiliary"}] * 2]
    assert_same_run(deployment.run_directory, run(deployment.config).directory)


def test_one_message_a_client_a_round_and_nothing_but_weights_and_smashed_data_goes_up(deploy):
    deployment = deploy(rounds=2)
    seen = []

    def overhear(client, message, reply):
        if message.metadata.message_type == "train":
            seen.append(
                (client, message.metadata.group_id, sorted({p.split("/")[0] for p in unpack(reply.content[TENSORS])}))
            )
        return reply

    deployment.serve(deployment.grid(tamper=overhear))
    groups = ["upload", "weights"]
    assert sorted(seen) == [(client, str(t), groups) for client in range(3) for t in range(2)]


# What a client keeps


@pytest.mark.parametrize(
    ("every", "kept"), [(2, [[0], [0, 1], [1, 2], [1, 2, 3], [3, 4]]), (9, [[0], [0, 1], [1, 2], [2, 3], [3, 4]])]
)
def test_a_node_keeps_the_states_that_the_server_may_ask_for(deploy, every, kept):
    """Those after the last checkpoint and after the last round, and its newest."""
    deployment = deploy(rounds=5, checkpoint_every=every, algorithm="fedavg")
    seen = []

    def look(client, message, reply):
        if message.metadata.message_type == "train" and client == 0:
            seen.append(deployment.state(0).rounds())
        return reply

    deployment.serve(deployment.grid(tamper=look))
    assert seen == kept


def test_at_the_end_a_node_has_the_final_weights_and_no_state(deploy, monkeypatch):
    deployment = deploy(rounds=4, checkpoint_every=2)
    built, build = [], Site._setup
    monkeypatch.setattr(Site, "_setup", lambda site, *given: (built.append(site.client), build(site, *given))[1])
    result = deployment.serve(deployment.grid())
    assert built.count(0) == 4  # to keep the final weights it needs no model
    assert deployment.state(0).rounds() == []
    final = load_tensors(deployment.state(0).model_file)[0]
    model = load_tensors(result.model_file)[0]
    mine = {name.removeprefix("client/"): x for name, x in final.items() if name.startswith("client/")}
    assert mine
    assert all(torch.equal(model[name], tensor) for name, tensor in mine.items())
    assert any(name.startswith("auxiliary/") for name in final)


class Killed(BaseException):
    """In the place of kill -9."""


def killed(*arguments):
    raise Killed


@pytest.mark.slow
def test_a_killed_server_goes_on_from_its_checkpoint_bit_for_bit(deploy):
    deployment = deploy(rounds=4, checkpoint_every=2, align_every=1)

    def kill(client, message, reply):
        if (message.metadata.message_type, message.metadata.group_id, client) == ("train", "3", 1):
            raise Killed
        return reply

    with pytest.raises(Killed):
        deployment.serve(deployment.grid(tamper=kill))
    assert len(deployment.metrics()) == 3
    assert deployment.state(0).rounds() == [1, 2, 3]  # client 0 had played round 3
    result = deployment.serve(deployment.grid())
    assert_same_run(result.directory, run(deployment.config).directory)


def final_weights(deployment):
    """By client, what its site has in the end."""
    return {client: load_tensors(deployment.state(client).model_file)[0] for client in range(deployment.config.clients)}


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"codec": CODECS}, marks=pytest.mark.slow)], ids=["plain", "codecs"]
)
def test_a_server_killed_at_the_end_brings_the_sites_their_final_weights_by_the_same_command(
    deploy, monkeypatch, capsys, tmp_path, changes
):
    """Killed before any site was told, then when clients 0 and 1 were."""
    deployment = deploy(rounds=3, align_every=2, checkpoint_every=9, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(FlowerEngine, "finish", killed)
        with pytest.raises(Killed):
            deployment.serve(deployment.grid())
    assert RunDirectory(deployment.run_directory).finished()

    def kill(client, message, reply):
        if (message.metadata.message_type, client) == ("query.finish", 1):
            raise Killed
        return reply

    with pytest.raises(Killed):
        deployment.serve(deployment.grid(tamper=kill))
    assert not deployment.state(2).model_file.exists()
    result = deployment.serve(deployment.grid())
    assert len(result.metrics) == 3
    assert result.stopped == "all 3 rounds played"
    assert "did not get" not in capsys.readouterr().out
    assert not RunDirectory(deployment.run_directory).checkpoint_file.exists()
    assert [deployment.state(client).rounds() for client in range(3)] == [[], [], []]
    assert_same_run(result.directory, run(deployment.config).directory)
    with pytest.raises(InputError, match="is finished"):
        deployment.serve(deployment.grid())

    found = final_weights(deployment)
    deployment.run_directory = tmp_path / "undisturbed"
    deployment.serve(deployment.grid())
    for client, expected in final_weights(deployment).items():
        assert found[client].keys() == expected.keys()
        assert all(torch.equal(found[client][name], tensor) for name, tensor in expected.items())


def test_a_run_of_which_no_site_was_told_is_not_over(deploy, capsys):
    deployment = deploy(rounds=1)

    def leave(client, message, reply):
        if (message.metadata.message_type, client) == ("train", 2):
            grid.nodes.clear()
        return reply

    grid = deployment.grid(tamper=leave)
    deployment.serve(grid)
    assert "No site got the final weights" in capsys.readouterr().out
    deployment.serve(deployment.grid([0, 1]))
    assert deployment.state(0).model_file.exists()
    with pytest.raises(InputError, match="is finished"):
        deployment.serve(deployment.grid())


def test_a_server_killed_while_it_begins_goes_on_by_the_same_command(deploy, monkeypatch):
    """Between the configuration and the run's id."""
    deployment = deploy(rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr(server_app, "write_json", killed)
        with pytest.raises(Killed):
            deployment.serve(deployment.grid())
    assert [file.name for file in deployment.run_directory.iterdir()] == ["config.json"]
    result = deployment.serve(deployment.grid())
    assert_same_run(result.directory, run(deployment.config).directory)


def test_a_run_without_its_id_is_refused(deploy):
    """The states at the sites are under it."""
    deployment = deploy(rounds=2)

    def kill(client, message, reply):
        if message.metadata.group_id == "1":
            raise Killed
        return reply

    with pytest.raises(Killed):
        deployment.serve(deployment.grid(tamper=kill))
    (deployment.run_directory / "federation.json").unlink()
    with pytest.raises(InputError, match="does not hold a run on Flower"):
        deployment.serve(deployment.grid())
    assert (deployment.run_directory / "config.json").exists()


def test_a_run_that_is_refused_before_its_first_round_leaves_its_directory_to_a_corrected_one(deploy, monkeypatch):
    deployment = deploy(rounds=1)

    def refuse(*arguments):
        raise InputError("This cannot run.")

    with monkeypatch.context() as patch:
        patch.setattr(server_app, "check_structure", refuse)
        with pytest.raises(InputError, match="This cannot run"):
            deployment.serve(deployment.grid())
    assert not deployment.run_directory.exists()
    write_agreement(deployment.config_file, replace(deployment.config, rounds=2), deployment.agreement)
    assert len(deployment.serve(deployment.grid()).metrics) == 2


def test_a_replayed_round_without_the_matching_state_is_refused_with_the_reason(deploy):
    deployment = deploy(rounds=2)
    assignment = Assignment("a" * 32, 1, 0, 0, -1, {}, {})
    grid = deployment.grid([0])
    message = Message(assignment.content(), next(iter(grid.nodes)), "train")
    (id,) = grid.push_messages([message])
    (reply,) = grid.pull_messages([id])
    assert "does not have the client's state after round 0; it has those after: none" in reply.error.reason


def test_a_node_with_another_release_refuses_its_round(deploy, monkeypatch):
    deployment = deploy()
    monkeypatch.setattr("fsl_sage.deploy.site.version", lambda name: "0.0.7")
    grid = deployment.grid([0])
    assignment = Assignment("a" * 32, 0, 0, -1, -1, {}, {})
    (id,) = grid.push_messages([Message(assignment.content(), next(iter(grid.nodes)), "train")])
    (reply,) = grid.pull_messages([id])
    assert re.search(r"The server runs fsl-sage .*, this node 0\.0\.7", reply.error.reason)


def test_a_node_that_lost_its_state_is_missing_and_the_run_goes_on(deploy):
    deployment = deploy(rounds=3)

    def lose(client, message, reply):
        if (message.metadata.group_id, client) == ("1", 2):
            shutil.rmtree(deployment.state(2).directory)
        return reply

    deployment.serve(deployment.grid(tamper=lose))
    assert [line["missing"] for line in deployment.metrics()] == [[], [], [2]]
    assert "state after round 1" in deployment.metrics()[2]["failures"]["2"]


def test_a_node_whose_state_is_damaged_is_missing_and_says_so(deploy):
    deployment = deploy(rounds=2)

    def flip(client, message, reply):
        if (message.metadata.group_id, client) == ("0", 2):
            file = deployment.state(2)._file(0)
            whole = bytearray(file.read_bytes())
            whole[-9] ^= 1
            file.write_bytes(whole)
        return reply

    deployment.serve(deployment.grid(tamper=flip))
    assert "after-0.safetensors is damaged" in deployment.metrics()[1]["failures"]["2"]


def test_a_reply_that_was_not_accepted_leaves_the_client_where_it_was(deploy):
    """Client 2's report on round 1 is lost; it must go on as a client that was absent, from its state after round 0."""
    deployment = deploy(rounds=3)
    asked = []

    def lose(client, message, reply):
        if message.metadata.message_type == "train" and client == 2:
            asked.append(Assignment.read(message.content).after)
        return None if (message.metadata.group_id, client) == ("1", 2) else reply

    deployment.serve(deployment.grid(tamper=lose), timeout=0.1)
    assert asked == [-1, 0, 0]
    assert [line["missing"] for line in deployment.metrics()] == [[], [2], []]
    assert deployment.metrics()[1]["failures"] == {"2": "no reply within 0.1 s"}


@pytest.mark.parametrize("run_id", ["../../etc", "", "A" * 32])
def test_a_run_id_cannot_lead_out_of_the_state_directory(tmp_path, run_id):
    with pytest.raises(InputError, match="32 hexadecimal digits"):
        NodeState(tmp_path, run_id, 0)


# Who takes part


def test_a_late_node_joins_and_one_that_leaves_is_missing(deploy):
    deployment = deploy(rounds=4)
    grid = deployment.grid([0, 1])

    def come_and_go(client, message, reply):
        if (message.metadata.group_id, client) == ("0", 0):
            deployment.join(grid, 2)
        if (message.metadata.group_id, client) == ("2", 0):
            del grid.nodes[min(grid.nodes)]
        return reply

    grid.tamper = come_and_go
    deployment.serve(grid)
    # Node 2 is asked who it is when round 1 starts, without waiting for it.
    assert [line["missing"] for line in deployment.metrics()] == [[2], [2], [], [0]]
    assert deployment.metrics()[0]["failures"] == {"2": "it is not connected"}
    billed = {entry.round for entry in RunDirectory(deployment.run_directory).ledger() if entry.client == 2}
    assert billed == {2, 3}  # who is not connected is sent nothing


@pytest.mark.slow
def test_fewer_than_the_minimum_end_the_run_and_keep_the_checkpoint(deploy):
    deployment = deploy(rounds=3)

    def silent(client, message, reply):
        return None if message.metadata.group_id == "1" and client else reply

    with pytest.raises(TrainingError, match="Only 1 of 3 clients answered in round 1, but 'minimum' is 2"):
        deployment.serve(deployment.grid(tamper=silent), minimum=2, timeout=0.1)
    with pytest.raises(TrainingError, match="Only 1 of 3 clients are connected in round 1, but 'minimum' is 2"):
        deployment.serve(deployment.grid([0]), minimum=2)
    assert len(deployment.metrics()) == 1
    assert_same_run(deployment.serve(deployment.grid()).directory, run(deployment.config).directory)


@pytest.mark.parametrize(("waited", "pause"), [(0.0, 0.5), (10.0, 0.5), (60.0, 3.0), (3600.0, 5.0)])
def test_replies_that_take_long_are_looked_for_less_often(monkeypatch, waited, pause):
    monkeypatch.setattr(courier, "POLL", 0.5)
    assert courier.pause_after(waited) == pause


def test_a_superlink_that_does_not_answer_at_once_is_asked_again(deploy, monkeypatch):
    """Every other request fails, as on a machine that is busy; the run is the one of a quiet machine."""
    monkeypatch.setattr("fsl_sage.engines.flower.courier.PAUSE", 0.0)
    deployment = deploy(rounds=2)
    grid = deployment.grid()
    for name in ("get_nodes", "push_messages", "pull_messages"):
        monkeypatch.setattr(grid, name, every_other_fails(getattr(grid, name)))
    result = deployment.serve(grid)
    assert_same_run(result.directory, run(deployment.config).directory)
    monkeypatch.setattr("fsl_sage.engines.flower.courier.PATIENCE", 0.0)
    deployment.run_directory = deployment.directory / "second"
    with pytest.raises(httpx.ConnectTimeout):
        deployment.serve(grid)


def every_other_fails(request):
    """A request that fails the first time, and so on."""
    calls = count()

    def asked(*arguments):
        if next(calls) % 2 == 0:
            raise httpx.ConnectTimeout("The handshake operation timed out")
        return request(*arguments)

    return asked


def test_two_nodes_cannot_be_the_same_client(deploy, capsys):
    deployment = deploy(rounds=1)
    grid = deployment.grid([0])
    second = deployment.join(grid, 0)
    deployment.serve(grid)
    assert f"is node {second}" not in capsys.readouterr().out


def test_a_registered_name_decides(deploy, capsys):
    deployment = deploy(rounds=1)
    grid = deployment.grid([])
    deployment.join(grid, 0, name="client-0")
    impostor, stranger = deployment.join(grid, 1, name="client-2"), deployment.join(grid, 0, name="client-9")
    deployment.serve(grid)
    said = capsys.readouterr().out
    assert f"Node {stranger} cannot take part: there is no client 9, only 0 to 2" in said
    assert f"Client 2 is node {impostor}" in said  # whatever its --node-config says, and its site then refuses
    assert deployment.metrics()[0]["failures"] == {
        "1": "it is not connected",
        "2": "A message for client 2 came to the node of client 1.",
    }


def test_a_node_without_a_name_cannot_take_the_place_of_a_named_one_that_is_offline(deploy, capsys):
    deployment = deploy(rounds=2)
    grid = deployment.grid([])
    for client in (0, 1):
        deployment.join(grid, client, name=f"client-{client}")
    nameless = deployment.join(grid, 2)
    deployment.serve(grid)
    assert f"Node {nameless} cannot take part: other nodes are registered by name" in capsys.readouterr().out
    assert [line["missing"] for line in deployment.metrics()] == [[2], [2]]


def test_a_named_node_takes_its_place_from_one_without_a_name(deploy, capsys):
    """The nameless was there first; also after a restart of the server, when it is there first again."""
    deployment = deploy(rounds=4)
    grid = deployment.grid([2])

    def come(client, message, reply):
        if message.metadata.group_id == "0" and len(grid.nodes) == 1:
            for named in range(3):
                deployment.join(grid, named, name=f"client-{named}")
        if message.metadata.group_id == "2":
            raise KeyboardInterrupt
        return reply

    grid.tamper = come
    with pytest.raises(KeyboardInterrupt):
        deployment.serve(grid)
    assert [line["missing"] for line in deployment.metrics()] == [[0, 1], []]
    assert f"Client 2 is node {max(grid.nodes)}" in capsys.readouterr().out
    again = deployment.grid([2])
    with pytest.raises(TrainingError, match="Only 0 of 3 clients are connected"):
        deployment.serve(again)
    assert "registered by name" in capsys.readouterr().out


def test_nodes_with_registered_names_are_not_asked(deploy):
    deployment = deploy(rounds=1)
    grid = deployment.grid([])
    for client in range(3):
        deployment.join(grid, client, name=f"client-{client}")
    deployment.serve(grid)
    assert [message.metadata.message_type for message in grid.sent] == ["train"] * 3 + ["query.finish"] * 3
    assert deployment.metrics()[0]["missing"] == []


def test_a_site_whose_data_are_not_as_agreed_says_so_before_the_first_round(deploy, capsys):
    deployment = deploy(rounds=1)
    grid = deployment.grid([0, 1])
    grid.join(2, deployment.sites[0].parent, deployment.states)  # a directory: all sites' archives
    deployment.serve(grid)
    assert "cannot take part: Client 2 has 150 examples here but 50 in the agreement" in capsys.readouterr().out


# Hostile replies


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """An inspector that waits for client 2's report on round 1, and the bytes of an honest one."""
    deployment = Deployment(tiny_config({"rounds": 1}), tmp_path_factory.mktemp("honest"))
    reports = []

    def overhear(client, message, reply):
        if client == 2 and message.metadata.message_type == "train":
            reports.append(reply.content)
        return reply

    deployment.serve(deployment.grid(tamper=overhear))
    run = str(reports[0].config_records[ABOUT]["run"])
    shapes = image_shapes(deployment.agreement.sizes(sum(deployment.agreement.examples)))
    dry = DryEngine(make_dry_setup(deployment.config, shapes, deployment.agreement.examples))
    return Inspector(run, dry, torch.device("cpu")), reports[0]


def a_copy(content):
    return RecordDict({ABOUT: ConfigRecord({**content[ABOUT]}), TENSORS: ArrayRecord({**content[TENSORS]})})


def test_an_honest_report_passes(honest):
    inspector, content = honest
    report = inspector.inspect(a_copy(content), 0, 2)
    assert [upload.values["step"] for upload in report.uploads] == [0, 2]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_report_is_rejected_with_the_reason(honest, kind):
    inspector, content = honest
    spoil, reason = HOSTILE[kind]
    spoilt = a_copy(content)
    spoil(spoilt)
    with pytest.raises(RejectedError, match=re.escape(reason)):
        inspector.inspect(spoilt, 0, 2)


def test_whatever_inspection_raises_is_a_rejection(honest, monkeypatch):
    inspector, content = honest
    for error in (KeyError("x"), MemoryError(), RecursionError(), OverflowError(), AttributeError()):
        monkeypatch.setattr("fsl_sage.engines.flower.inspection.unpack", raiser(error))
        with pytest.raises(RejectedError, match=rf"it cannot be read \({type(error).__name__}\)"):
            inspector.inspect(a_copy(content), 0, 2)


def raiser(error):
    def fail(*arguments):
        raise error

    return fail


@pytest.mark.slow
def test_after_hostile_replies_the_model_is_as_if_they_had_not_come(deploy, capsys):
    deployment = deploy(rounds=4, align_every=2)
    kinds = {("1", 2): "nan", ("2", 0): "label too high", ("2", 1): "oversized"}

    def hostile(client, message, reply):
        if kind := kinds.get((message.metadata.group_id, client)):
            HOSTILE[kind][0](reply.content)
        return reply

    def silent(client, message, reply):
        return None if (message.metadata.group_id, client) in kinds else reply

    grid = deployment.grid(tamper=hostile)
    result = deployment.serve(grid)
    assert [line["missing"] for line in result.metrics] == [[], [2], [0, 1], []]
    node = max(grid.nodes)
    assert result.metrics[1]["rejected"]["2"].startswith(f"node {node}: ")
    assert f"Client 2 is missing: node {node}: " in capsys.readouterr().out

    shutil.rmtree(deployment.states)
    deployment.run_directory = deployment.directory / "silent"
    deployment.serve(deployment.grid(tamper=silent), timeout=0.1)
    assert_same_run(result.directory, deployment.run_directory)


def _first(all, words):
    return next(path for path in sorted(all) if all[path].dtype == torch.uint8 and words in path)


def _another_scale(all):
    payload = all[path := _first(all, "/activations/")].clone()
    payload[:4] = torch.tensor([float("nan")]).view(torch.uint8)
    return {**all, path: payload}


def _shorter(all):
    return {**all, (path := _first(all, "weights/")): all[path][:-1]}


def _of_another_shape(all):
    payload = all.pop(path := _first(all, "/activations/"))
    return {**all, path.replace("[16,", "[160000,"): payload}


def _not_coded(all):
    payload = all.pop(path := _first(all, "/activations/"))
    return {**all, path.partition("@")[0]: payload}


def _a_bomb(all):
    zstandard = pytest.importorskip("zstandard")
    path = _first(all, "weights/client/block1.conv")
    bomb = zstandard.ZstdCompressor().compress(bytes(2**24))
    return {**all, path: torch.frombuffer(bytearray(bomb), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_another_scale, "levels that cannot be"),
        (_shorter, "payload"),
        (_of_another_shape, "has the shape"),
        (_not_coded, "is not coded"),
        (_a_bomb, "expected"),
    ],
)
def test_payloads_that_cannot_be_are_rejected(deploy, spoil, reason):
    deployment = deploy(rounds=1, codec={"activations": "int4", "update": "int8+zstd"}, data={"train_images": 96})

    def hostile(client, message, reply):
        if client == 1 and message.metadata.message_type == "train":
            reply.content[TENSORS] = pack(spoil(unpack(reply.content[TENSORS])))
        return reply

    result = deployment.serve(deployment.grid(tamper=hostile))
    assert reason in result.metrics[0]["rejected"]["1"]


def test_places_of_examples_that_cannot_be_are_rejected_and_the_run_goes_on(deploy):
    """Uploads are differences from what the server remembers at these places; see also benchmarks/hostile.py."""
    deployment = deploy(rounds=2, codec={"activations": "cached-int4"}, data={"train_images": 96})

    def hostile(client, message, reply):
        if client == 1 and message.metadata.group_id == "0":
            all = unpack(reply.content[TENSORS])
            path = next(path for path in sorted(all) if path.endswith("/places"))
            reply.content[TENSORS] = pack({**all, path: all[path] + 32})
        return reply

    result = deployment.serve(deployment.grid(tamper=hostile))
    assert "beyond the 32" in result.metrics[0]["rejected"]["1"]
    assert [line["missing"] for line in result.metrics] == [[1], []]


def test_a_reply_of_the_round_before_is_rejected(deploy):
    deployment = deploy(rounds=2)
    before = {}

    def replay(client, message, reply):
        if client == 1 and message.metadata.message_type == "train":
            old = before.setdefault("reply", reply)
            return Message(old.content, reply_to=message)
        return reply

    result = deployment.serve(deployment.grid(tamper=replay))
    assert "its round is 0 instead of 1" in result.metrics[1]["rejected"]["1"]


def test_what_a_site_says_is_printed_short_and_in_one_line(honest):
    inspector, content = honest
    spoilt = a_copy(content)
    spoilt[ABOUT]["run"] = "\x1b[31mred\n" + "x" * 1000
    with pytest.raises(RejectedError) as caught:
        inspector.inspect(spoilt, 0, 2)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


# What cannot run


@pytest.mark.parametrize("algorithm", ["splitfed-ms", "splitfed-ss"])
def test_algorithms_whose_clients_wait_are_refused(deploy, algorithm):
    with pytest.raises(InputError, match=f"{algorithm} cannot run on Flower with these options: .* --engine ray"):
        deploy(algorithm=algorithm)


def test_what_else_cannot_run_is_refused(deploy):
    with pytest.raises(InputError, match="batch-norm local cannot run on Flower"):
        deploy(model={"batch_norm": "local"})


def test_the_agreement_survives_its_file_exactly(deploy, tmp_path):
    deployment = deploy(optimizer={"lr": 0.1 + 0.2}, alignment={"passes": 2}, algorithm="lazy-fsl-sage", align_until=0)
    path = tmp_path / "config.json"
    write_agreement(path, deployment.config, deployment.agreement)
    config, agreement = read_agreement(path)
    assert (config, agreement) == (deployment.config, deployment.agreement)


def test_a_finished_or_another_run_is_not_gone_on_with(deploy):
    deployment = deploy(rounds=1)
    deployment.serve(deployment.grid())
    with pytest.raises(InputError, match="is finished"):
        deployment.serve(deployment.grid())
    (deployment.run_directory / "result.json").unlink()
    write_agreement(deployment.config_file, replace(deployment.config, rounds=3), deployment.agreement)
    with pytest.raises(InputError, match="holds a run of another configuration"):
        deployment.serve(deployment.grid())

"""Sites hold their own part of a model and their own data, whatever kind of problem it is."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("peft")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file
from torch.nn import functional as F

from fsl_sage import Config, Score, TensorProblem
from fsl_sage.algorithms import resolve
from fsl_sage.cli import main
from fsl_sage.config import from_dict
from fsl_sage.deploy.agreement import at_site, read_agreement
from fsl_sage.deploy.app import agree
from fsl_sage.deploy.site import Place, Site
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.flower import laying, weight_store
from fsl_sage.engines.flower.contents import ABOUT, TENSORS, pack, unpack
from fsl_sage.engines.flower.courier import Refusal
from fsl_sage.engines.flower.foundation import Foundation
from fsl_sage.engines.flower.inspection import Inspector, RejectedError
from fsl_sage.engines.flower.laying import Laying
from fsl_sage.engines.flower.weight_store import WeightStore
from fsl_sage.engines.local import LocalEngine
from fsl_sage.engines.process import check_room
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import Federation, run
from fsl_sage.experiment.setup import make_dry_setup, make_setup
from fsl_sage.problems.sites import problem_at_server
from fsl_sage.problems.texts.one_side import load_side
from fsl_sage.problems.texts.sites import text_shapes
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.split.trace.skeleton import named_tensors
from fsl_sage.wire.message import Tensors

from ..conftest import tiny_config
from ..engines.test_flower import Deployment, assert_same_numbers, assert_same_run, hasty  # noqa: F401
from ..problems.texts.test_labelled import save_bert, save_texts
from ..texts import save_all
from . import own_table


def language(directory: Path, family: str = "llama", **changes: Any) -> Deployment:
    usual = {**save_all(directory, family), "out": str(directory / "local"), "clients": 2, "rounds": 2}
    values = {**usual, **changes, "model": {**usual["model"], **changes.get("model", {})}}
    values["data"] = {**values["data"], "sequence_length": 24}
    return Deployment(tiny_config(values), directory, tokenizer=str(directory / family))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployment, RecordDict]:
    """A deployment after its only round, and what client 1 replied."""
    deployment = language(tmp_path_factory.mktemp("played"), rounds=1, clients=2)
    replies: list[RecordDict] = []

    def overhear(client: int, message: Any, reply: Any) -> Any:
        if client == 1 and message.metadata.message_type == "train":
            replies.append(copy.deepcopy(reply.content))
        return reply

    deployment.serve(deployment.grid(tamper=overhear))
    return deployment, replies[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"align_every": 1},
        {"align_every": 1, "model": {"auxiliary": "ridge:9"}, "hold": 0.5},
        pytest.param({"algorithm": "cse-fsl", "lora": {"dropout": 0.1}}, marks=pytest.mark.slow),
        pytest.param({"algorithm": "fedavg"}, marks=pytest.mark.slow),
        pytest.param({"family": "gpt2", "lora": {"auxiliary": "adapters"}}, marks=pytest.mark.slow),
    ],
    ids=["fsl-sage", "ridge", "cse-fsl with dropout", "fedavg", "gpt2"],
)
def test_language_models_give_the_bits_of_the_local_engine(tmp_path: Path, changes: dict[str, Any]) -> None:
    deployment = language(tmp_path, **changes)
    result = deployment.serve(deployment.grid())
    assert all(not line["missing"] for line in result.metrics)
    assert_same_run(result.directory, run(deployment.config).directory)
    about = json.loads((result.directory / "federation.json").read_text())
    told = "the tokens of every completion" in about["what_leaves_a_site"]
    assert told == (deployment.config.algorithm != "fedavg")
    peaks = [json.loads(deployment.state(client).result_file.read_text()) for client in range(2)]
    assert all(peak["processes"] == 2 and peak["peak_memory_bytes"] > 10**7 for peak in peaks)


@pytest.mark.slow
def test_texts_with_labels_give_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    model, texts = save_bert(tmp_path / "bert"), save_texts(tmp_path / "texts.jsonl", 60)
    values = {
        "data": {"name": f"jsonl:{texts}", "sequence_length": 20, "train_images": None, "test_images": None},
        "model": {"name": f"hf:{model}", "frozen": ["bert.embeddings"]},
        "out": str(tmp_path / "local"),
    }
    deployment = Deployment(tiny_config({**values, "clients": 2}), tmp_path, tokenizer=str(model))
    result = deployment.serve(deployment.grid())
    assert_same_run(result.directory, run(deployment.config).directory)


# What a site's process holds

FREED = """
import torch
from fsl_sage.engines import process

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) // 1024

process.{prepare}(1)
before = resident()
del [torch.ones(2**18) for _ in range(200)][:]
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
@pytest.mark.parametrize(("prepare", "kept"), [("prepare_small_process", (-10, 30)), ("prepare_process", (150, 250))])
def test_the_process_of_a_site_gives_freed_memory_back(prepare: str, kept: tuple[int, int]) -> None:
    """200 tensors of 1 MiB are made and freed. Other processes that train keep them for the next step."""
    done = subprocess.run(
        [sys.executable, "-c", FREED.format(prepare=prepare)], capture_output=True, text=True, check=True
    )
    assert kept[0] < int(done.stdout) < kept[1]


def site_of(deployment: Deployment, client: int) -> Site:
    config, agreement = read_agreement(deployment.config_file)
    place = Place(client, deployment.sites[client], deployment.states, Path(deployment.node["tokenizer"]))
    return Site(at_site(config, deployment.config_file), agreement, place)


def test_a_site_holds_its_own_part_and_nothing_else(played: tuple[Deployment, RecordDict]) -> None:
    deployment, _ = played
    setup = site_of(deployment, 0)._setup(deployment.state(0))
    assert set(setup.modules) == {"client", "auxiliary"}
    here = {part: named_tensors(module) for part, module in setup.modules.items()}
    whole = make_setup(*at_server(deployment))
    for part, tensors in here.items():
        fixed = {name for name, tensor in tensors.items() if not tensor.is_meta}
        assert fixed == {n for n, x in named_tensors(whole.modules[part]).items() if n not in whole.initial[part]}
        assert all(torch.equal(tensors[name], named_tensors(whole.modules[part])[name]) for name in fixed)
    assert not any(".layers.4." in name for name in here["client"] | here["auxiliary"])


@pytest.mark.slow
def test_the_sites_need_no_files_of_the_model(tmp_path: Path) -> None:
    deployment = language(tmp_path, rounds=1)
    (tmp_path / "tokenizer").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / file).write_bytes((tmp_path / "llama" / file).read_bytes())
    deployment.node["tokenizer"] = str(tmp_path / "tokenizer")
    assert at_site(deployment.config, deployment.config_file).model.name.startswith(f"hf:{tmp_path / 'app'}")
    assert not list((tmp_path / "app").rglob("*.safetensors"))
    assert deployment.serve(deployment.grid()).metrics[0]["missing"] == []


# Large frozen weights


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frozen weight is large, and has several chunks."""
    monkeypatch.setattr("fsl_sage.engines.flower.foundation.SMALL", 0)
    monkeypatch.setattr("fsl_sage.engines.flower.foundation.SCALAR", 64)
    for module in (weight_store, laying):
        monkeypatch.setattr(module, "CHUNK", 256)
    monkeypatch.setattr("fsl_sage.deploy.site.CHUNK", 256)
    monkeypatch.setattr(laying, "IN_A_MESSAGE", 1024)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_large_weights_come_in_chunks_that_a_lost_message_does_not_lose(tmp_path: Path) -> None:
    deployment = language(tmp_path, rounds=1)
    chunks: list[str] = []

    def lose(client: int, message: Any, reply: Any) -> Any:
        if message.metadata.message_type == "query.weights":
            chunks.append(client)
            if len(chunks) in (2, 5):
                return None  # the site has it, and the server does not know
        return reply

    result = deployment.serve(deployment.grid(tamper=lose), timeout=0.2)
    assert len(chunks) > 8
    assert_same_run(result.directory, run(deployment.config).directory)

    # A second run finds them, and takes away what a killed process has left.
    chunks.clear()
    left = deployment.states / "weights" / f"{'a' * 64}.0.part-{ended_process()}"
    left.touch()
    deployment.run_directory = tmp_path / "second"
    deployment.serve(deployment.grid(tamper=lose))
    assert chunks == []
    assert not left.exists()


def ended_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.usefixtures("large")
def test_weights_that_do_not_fit_into_a_sites_memory_are_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def full(count: int) -> None:
        asked.append(count)
        check_room(2**62)  # more than any kernel gives

    monkeypatch.setattr("fsl_sage.deploy.site.check_room", full)
    deployment = language(tmp_path, rounds=1)
    grid = deployment.grid()
    with pytest.raises(TrainingError, match="Only 0 of 2 clients got the weights that they start from"):
        deployment.serve(grid)
    assert "Client 1 is missing: the memory of its process does not suffice" in capsys.readouterr().out
    assert not [message for message in grid.sent if message.metadata.message_type == "query.weights"]
    frozen = Foundation.of(make_setup(*at_server(deployment)))[1]
    assert asked == [sum(tensor.nbytes for tensor in frozen.values())] * 2


def test_room_that_there_is_is_not_taken() -> None:
    check_room(2**20)
    check_room(0)


def at_server(deployment: Deployment) -> tuple[Any, Any, Any]:
    """What the server makes its setup from."""
    config, agreement = read_agreement(deployment.config_file)
    return config, problem_at_server(config, agreement), agreement.examples


def join_apart(deployment: Deployment, grid: Any, client: int) -> Path:
    """A node with a disk of its own; returns where its states are."""
    state = deployment.directory / f"state-{client}"
    grid.join(client, deployment.sites[client], state, **deployment.node)
    return state


def sent_to(grid: Any, client: int, kind: str) -> int:
    """How many messages of a kind a client's nodes got, those that are gone too."""
    ids = {id for id, node in grid.nodes.items() if node.config["client"] == client} | grid.gone.get(client, set())
    return sum(m.metadata.dst_node_id in ids and m.metadata.message_type == kind for m in grid.sent)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_a_late_site_and_one_that_is_started_again_get_what_they_lack_and_take_part(tmp_path: Path) -> None:
    """Texts, and a model whose frozen weights come in chunks. A node that is new has another id, and its disk."""
    deployment = language(tmp_path, rounds=5)
    grid = deployment.grid([])
    join_apart(deployment, grid, 0)

    def come_and_go(client: int, message: Any, reply: Any) -> Any:
        kind = message.metadata.message_type, message.metadata.group_id
        if kind == ("train", "0"):
            join_apart(deployment, grid, 1)
        if kind == ("train", "2") and client == 0:
            old = min(grid.nodes)
            grid.gone[0] = {old}
            del grid.nodes[old]
            join_apart(deployment, grid, 0)
        return reply

    grid.tamper = come_and_go
    deployment.serve(grid)
    # A new node is asked who it is when a round starts, without waiting for it.
    assert [line["missing"] for line in deployment.metrics()] == [[1], [1], [], [0], []]
    assert sent_to(grid, 1, "query.weights") > 2
    before = sent_to(grid, 0, "query.weights")
    old = next(iter(grid.gone[0]))
    assert before == sum(m.metadata.dst_node_id == old and "weights" in m.metadata.message_type for m in grid.sent)
    assert before > 2

    # The run is the one in which they had been silent in these rounds, but for the bytes: who is silent was sent some.
    absent = {("0", 1), ("1", 1), ("3", 0)}
    federation, deployment.run_directory = deployment.run_directory, tmp_path / "silent"
    deployment.states = tmp_path / "other-states"
    silent = deployment.grid(tamper=lambda c, m, r: None if (m.metadata.group_id, c) in absent else r)
    deployment.serve(silent, timeout=0.1)
    assert_same_numbers(federation, deployment.run_directory)
    one, other = (RunDirectory(path).ledger() for path in (federation, deployment.run_directory))
    assert not [entry for entry in one if (str(entry.round), entry.client) in absent]
    assert sum(entry.bytes for entry in one) < sum(entry.bytes for entry in other)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_frozen_weights_that_a_site_has_lost_come_again_and_a_lost_state_is_refused(tmp_path: Path) -> None:
    deployment = language(tmp_path, rounds=4)
    grid = deployment.grid([])
    states = [join_apart(deployment, grid, client) for client in range(2)]

    def lose(client: int, message: Any, reply: Any) -> Any:
        kind = message.metadata.message_type, message.metadata.group_id
        if kind == ("train", "0") and client == 1:
            sorted((states[1] / "weights").iterdir())[0].unlink()
        if kind == ("train", "2") and client == 1:
            (own,) = states[1].glob("*/client-1")
            shutil.rmtree(own)
        return reply

    grid.tamper = lose
    deployment.serve(grid)
    metrics = deployment.metrics()
    assert [line["missing"] for line in metrics] == [[], [1], [], [1]]
    assert "A frozen weight of this client is not in" in metrics[1]["failures"]["1"]
    assert "does not have the client's state after round 2" in metrics[3]["failures"]["1"]


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_a_frozen_weight_that_was_damaged_on_a_sites_disk_is_noticed_before_a_run(tmp_path: Path) -> None:
    deployment = language(tmp_path, rounds=1)
    first = deployment.serve(deployment.grid())
    damaged = sorted((deployment.states / "weights").iterdir())[0]
    content = bytearray(damaged.read_bytes())
    content[5] ^= 1
    damaged.write_bytes(content)
    deployment.run_directory = tmp_path / "second"
    grid = deployment.grid()
    second = deployment.serve(grid)
    assert [m for m in grid.sent if m.metadata.message_type == "query.weights"]
    assert_same_run(first.directory, second.directory)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_weights_in_the_files_of_its_side_are_not_sent_to_a_site(tmp_path: Path) -> None:
    """`export-side` writes these files. They have nothing of the other side, and do for `load_side` too."""
    deployment = language(tmp_path, rounds=1, lora={"dropout": 0.0, "auxiliary": "adapters"})
    side, config = tmp_path / "side", deployment.config
    options = ["--model.name", config.model.name, "--data.name", "e2e", "--lora.auxiliary", "adapters"]
    main(["deploy", "export-side", str(side), "--part", "client", *options])
    names = set(load_file(side / "model.safetensors"))
    assert names < set(load_file(tmp_path / "llama" / "model.safetensors"))
    assert not any(".layers.4." in name for name in names)
    own = replace(config, model=replace(config.model, name=f"hf:{side}"))
    for part, module in load_side(config, ["client", "auxiliary"]).items():
        tensors = named_tensors(load_side(own, [part])[part])
        assert all(torch.equal(tensors[name], tensor) for name, tensor in named_tensors(module).items())

    deployment.node = {"model": str(side)}  # with it comes the tokenizer
    grid = deployment.grid()
    result = deployment.serve(grid)
    assert not [message for message in grid.sent if message.metadata.message_type == "query.weights"]
    assert_same_run(result.directory, run(deployment.config).directory)


def test_a_damaged_chunk_is_noticed_and_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_store, "CHUNK", 4)
    content = b"0123456789"
    from hashlib import sha256

    name, store = sha256(content).hexdigest(), WeightStore(tmp_path)
    assert store.lacks(name, 10) == [0, 1, 2]
    store.put(name, 10, 2, b"89")
    store.put(name, 10, 0, b"0123")
    assert WeightStore(tmp_path).lacks(name, 10) == [1]
    store.put(name, 10, 1, b"4x67")
    assert store.lacks(name, 10) == [0, 1, 2]
    for number in range(3):
        store.put(name, 10, number, content[4 * number : 4 * number + 4])
    assert store.lacks(name, 10) == []
    assert store.path(name).read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == [name]
    with pytest.raises(InputError, match="not a SHA-256"):
        store.path("../../etc/passwd")


def test_what_killed_processes_have_left_of_weights_is_dropped(tmp_path: Path) -> None:
    """Files that they were writing, and the chunks of a weight that is complete; nothing else."""
    complete, other, gone = "a" * 64, "b" * 64, ended_process()
    left = [f"{other}.0.part-{gone}", f"{complete}.part-{gone}", f"{complete}.3"]
    kept = [complete, f"{other}.0", f"{other}.1.part-{os.getpid()}", "notes.txt", f"notes.part-{gone}"]
    for name in left + kept:
        (tmp_path / name).touch()
    WeightStore(tmp_path).drop_unfinished()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(kept)
    WeightStore(tmp_path / "never made").drop_unfinished()


def test_a_foundation_survives_the_way(played: tuple[Deployment, RecordDict]) -> None:
    setup = make_setup(played[0].config)
    foundation, large = Foundation.of(setup)
    again = Foundation.unpack(foundation.pack())
    assert large == {}
    assert (again.plan, again.places) == (foundation.plan, foundation.places)
    assert all(torch.equal(again.small[key], tensor) for key, tensor in foundation.small.items())
    with pytest.raises(InputError, match="cannot be read"):
        Foundation.unpack(b"x" * 100)


# What is refused


def test_a_site_with_another_tokenizer_or_other_texts_is_refused(
    played: tuple[Deployment, RecordDict], tmp_path: Path
) -> None:
    site = site_of(played[0], 0)
    other = replace(site.agreement, texts=replace(site.agreement.texts, words="0" * 16))
    with pytest.raises(InputError, match="is not the one agreed on"):
        Site(site.config, other, site.place).look()
    with pytest.raises(InputError, match=r"""needs the directory of its tokenizer"""):
        Site(site.config, site.agreement, replace(site.place, tokenizer=None)).look()
    other = replace(site.agreement, texts=replace(site.agreement.texts, longest=9))
    with pytest.raises(InputError, match="leaves nothing to learn"):
        Site(site.config, other, site.place).look()
    labels = save_texts(tmp_path / "labels.jsonl", 12)
    with pytest.raises(InputError, match="are labels, not prompts as agreed"):
        Site(site.config, site.agreement, replace(site.place, data=labels)).look()


Spoil = Callable[[Tensors, str], None]


def no_token(tensors: Tensors, upload: str) -> None:
    tensors[f"{upload}/labels/labels"] += 1000


def nothing_to_learn(tensors: Tensors, upload: str) -> None:
    tensors[f"{upload}/labels/mask"].zero_()


def one_is_shorter(tensors: Tensors, upload: str) -> None:
    tensors[f"{upload}/labels/labels"] = tensors[f"{upload}/labels/labels"][:, :-1]


def narrower(tensors: Tensors, upload: str) -> None:
    tensors[f"{upload}/activations/0"] = tensors[f"{upload}/activations/0"][..., :-1]


def empty(tensors: Tensors, upload: str) -> None:
    tensors |= {name: x[:, :0] for name, x in tensors.items() if name.startswith(upload)}


def longer(tensors: Tensors, upload: str) -> None:
    tensors |= {name: torch.cat([x] * 4, 1) for name, x in tensors.items() if name.startswith(upload)}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_token, "it has tokens outside 0 to"),
        (nothing_to_learn, "no token of it is to be learnt"),
        (one_is_shorter, "has the shape"),
        (narrower, "has the shape"),
        (empty, "has a length of 0 instead of 1 to 23"),
        (longer, "it is too large|instead of 1 to 23"),
    ],
)
def test_hostile_texts_are_rejected_with_the_reason(
    played: tuple[Deployment, RecordDict], spoil: Spoil, reason: str
) -> None:
    deployment, content = played
    config, agreement = read_agreement(deployment.config_file)
    shapes = text_shapes(agreement.texts, sum(agreement.examples), ())
    dry = DryEngine(make_dry_setup(config, shapes, agreement.examples))
    inspector = Inspector(str(content.config_records[ABOUT]["run"]), dry, torch.device("cpu"))
    assert inspector.inspect(content, 0, 1).uploads
    tensors = unpack(content.array_records[TENSORS])
    spoil(tensors, "upload/1")
    spoilt = RecordDict({ABOUT: content[ABOUT], TENSORS: pack(tensors)})
    with pytest.raises(RejectedError, match=reason):
        inspector.inspect(spoilt, 0, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_after_hostile_texts_and_a_killed_server_the_model_is_as_if_neither_had_been(tmp_path: Path) -> None:
    deployment = language(tmp_path, rounds=3, align_every=1)
    killed: list[int] = []

    class KilledError(BaseException):
        pass

    def hostile(client: int, message: Any, reply: Any) -> Any:
        kind = message.metadata.message_type, message.metadata.group_id, client
        if kind == ("train", "1", 0):
            tensors = unpack(reply.content.array_records[TENSORS])
            no_token(tensors, "upload/1")
            reply.content[TENSORS] = pack(tensors)
        if kind == ("train", "2", 1) and not killed:
            killed.append(client)
            raise KilledError
        return reply

    with pytest.raises(KilledError):
        deployment.serve(deployment.grid(tamper=hostile))
    grid = deployment.grid(tamper=hostile)
    result = deployment.serve(grid)
    assert not [m for m in grid.sent if m.metadata.message_type == "query.weights"], "the sites have them"
    assert [line["missing"] for line in result.metrics] == [[], [0], []]
    assert "it has tokens outside 0 to" in result.metrics[1]["rejected"]["0"]

    deployment.run_directory, deployment.states = tmp_path / "silent", tmp_path / "other-states"
    silent = deployment.grid(tamper=lambda c, m, r: None if (m.metadata.group_id, c) == ("1", 0) else r)
    deployment.serve(silent, timeout=0.1)
    assert_same_run(result.directory, deployment.run_directory)


def test_splitfed_is_refused_for_texts_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="splitfed-ss cannot run on Flower with these options: its clients wait"):
        language(tmp_path, algorithm="splitfed-ss")


def test_what_a_server_with_test_texts_alone_agrees_on(played: tuple[Deployment, RecordDict], tmp_path: Path) -> None:
    deployment, _ = played
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "test.jsonl").write_text('{"prompt": "name[Cotto]", "completion": "Cotto serves Thai ."}\n')
    data = replace(deployment.config.data, name=f"jsonl:{tmp_path / 'server'}", sequence_length=12)
    agreement, shares = agree(replace(deployment.config, data=data), (3, 4))
    assert (agreement.examples, agreement.texts.longest, agreement.texts.kind) == ((3, 4), 12, "prompts")
    assert agreement.texts.words == deployment.agreement.texts.words
    assert not shares
    assert (
        problem_at_server(replace(deployment.config, data=data), agreement)
        .make_task(deployment.config, torch.device("cpu"))
        .test_batches()
        == 1
    )


def test_a_problem_of_ones_own_whose_data_lie_at_the_sites(tmp_path: Path) -> None:
    """Its module is in the app; each site makes it of its own data. One site is centralised training of its rows."""
    for place, count in (("server", 6), ("site-0", 12), ("site-1", 8)):
        (tmp_path / place).mkdir()
        rows = torch.randn(count, 5, generator=torch.Generator().manual_seed(count))
        torch.save(rows, tmp_path / place / "x.pt")
    data = {"name": "tests.deploy.own_table:table", "dir": str(tmp_path / "server")}
    values = {"algorithm": "cse-fsl", "clients": 2, "rounds": 2, "batch_size": 4, "data": data, "device": "cpu"}
    config = resolve(from_dict({**values, "out": str(tmp_path / "local")}, Config()))
    deployment = Deployment(config, tmp_path, [tmp_path / "site-0", tmp_path / "site-1"], (12, 8))
    assert (tmp_path / "app" / "tests" / "deploy" / "own_table.py").exists()
    result = deployment.serve(deployment.grid())
    assert all(not line["missing"] and not line["rejected"] for line in result.metrics)
    assert result.metrics[1]["test_error"] != result.metrics[0]["test_error"]
    about = json.loads((result.directory / "federation.json").read_text())
    assert "the target of every example" in about["what_leaves_a_site"]

    # The same two clients in one process: the numbers are the federation's.
    torch.save(
        torch.cat([torch.load(tmp_path / f"site-{client}" / "x.pt", weights_only=True) for client in range(2)]),
        tmp_path / "server" / "all.pt",
    )
    local = make_setup(config, TwoTables(config, tmp_path), None)
    federation = Federation(local, LocalEngine(local))
    try:
        for t in range(2):
            federation.play_round(t, [0, 1])
        model = load_tensors(result.model_file)[0]
        assert all(torch.equal(tensor, model[name]) for name, tensor in federation.merged().items())
    finally:
        federation.engine.close()


class TwoTables(TensorProblem):
    """The rows of both sites, divided as they lie."""

    def __init__(self, config: Config, directory: Path) -> None:
        x = torch.load(directory / "server" / "all.pt", weights_only=True)
        test = torch.load(directory / "server" / "x.pt", weights_only=True)
        pairs = [(rows, rows.sum(1, keepdim=True)) for rows in (x, test)]
        score = Score("test_error", higher_is_better=False)
        super().__init__(*pairs, own_table.model, F.mse_loss, own_table.absolute, score, cut="0")

    def divide(self, config: Config) -> list[torch.Tensor]:
        return [torch.arange(12), torch.arange(12, 20)]


class Answers:
    """In the place of the courier: answers every message by what a site would say."""

    def __init__(self, answer: Callable[[Message], RecordDict | str]) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def exchange(self, messages: dict[int, Message], timeout: float) -> dict[int, Any]:
        self.asked += [message.metadata.message_type for message in messages.values()]
        answers = {client: self.answer(message) for client, message in messages.items()}
        return {client: x if isinstance(x, str) else SimpleNamespace(content=x) for client, x in answers.items()}


def a_laying() -> Laying:
    foundation: Any = SimpleNamespace(pack=lambda: b"")
    return Laying(foundation, {"a" * 64: torch.zeros(10)}, "b" * 32, lambda said: None)


def says(*lacks: Any) -> RecordDict:
    return RecordDict({ABOUT: ConfigRecord({"lacks": list(lacks)})})


def test_a_site_that_says_nonsense_or_always_lacks_the_same_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laying, "PAUSE", 0.0)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    nonsense = Answers(lambda message: says("x", "a" * 64 + ".7", "a" * 64 + ".-1", f"{'c' * 64}.0", "a" * 64 + ".٣"))
    assert a_laying().send({0: 5}, nonsense, 1.0) == {}, "what is not asked for in earnest is not sent"
    stuck = Answers(lambda message: says(f"{'a' * 64}.0", f"{'a' * 64}.0"))
    assert "are lost" in a_laying().send({0: 5}, stuck, 1.0)[0]
    assert stuck.asked.count("query.weights") < 10
    refuses = Answers(lambda message: Refusal("its disk is full"))
    assert a_laying().send({0: 5, 1: 6}, refuses, 1.0) == {0: "its disk is full", 1: "its disk is full"}
    assert len(refuses.asked) == 2
    away = Answers(lambda message: "Node Unavailable")
    assert a_laying().send({0: 5}, away, 1.0) == {0: "Node Unavailable"}
    assert len(away.asked) == laying.TRIES

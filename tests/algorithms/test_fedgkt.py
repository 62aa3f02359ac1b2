"""FedGKT: clients and server teach each other by logits, and no weight travels."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fsl_sage import ALGORITHMS
from fsl_sage.algorithms.fedgkt import FedGKT
from fsl_sage.config import Config
from fsl_sage.deploy.agreement import Agreement, check
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, resume, run
from fsl_sage.experiment.costs import cost, run_cost
from fsl_sage.experiment.federation import draw_cohort
from fsl_sage.experiment.setup import make_dry_setup, make_setup
from fsl_sage.optimizers import make_optimizer
from fsl_sage.problems.batches import batch_indices
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.roles.client import local_order
from fsl_sage.roles.replica import Slots
from fsl_sage.roles.work import boundary
from fsl_sage.seeding import generator
from fsl_sage.wire.paths import below

from ..test_experiment import assert_same_run, interrupt_after

BATCH = 16


@pytest.fixture
def gkt(tiny):
    def make(**changes):
        return tiny(algorithm="fedgkt", **changes)

    return make


def optimizer_of(module):
    return make_optimizer("adam", list(module.parameters()), lr=1e-3, weight_decay=1e-4, momentum=0.9)


def test_without_kl_clients_train_alone_and_the_server_on_their_features(gkt):
    """Bit for bit: independent local training, and a server that learns from features which it does not change."""
    config = gkt(client_kl=0.0, server_kl=0.0, server_epochs=2, clients=2, workers=1)
    found = load_tensors(run(config).model_file)[0]
    setup = make_setup(config)
    task, server = setup.settings.task, setup.modules["server"]
    learns = optimizer_of(server)
    alone = {n: {part: _copy(setup, part) for part in ("client", "auxiliary")} for n in range(2)}
    optimizers = {n: [optimizer_of(module) for module in own.values()] for n, own in alone.items()}
    for t in range(config.rounds):
        features, labels = [], []
        for n, own in alone.items():
            examples = setup.examples[n]
            for step, places in enumerate(local_order(len(examples), config, n, t)):
                batch = task.training_batch(examples[places], generator(config.seed, "augment", n, t, step))
                z = boundary(own["client"](batch.inputs))
                F.cross_entropy(own["auxiliary"](*z), batch.target["labels"]).backward()
                for optimizer in optimizers[n]:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            for chosen in examples.split(BATCH):
                batch = task.plain_batch(chosen)
                with torch.no_grad():
                    features += boundary(own["client"].eval()(batch.inputs))
                labels.append(batch.target["labels"])
                own["client"].train()
        z, y = torch.cat(features), torch.cat(labels)
        for epoch in range(2):
            for chosen in batch_indices(len(z), BATCH, generator(config.seed, "server order", round=t, step=epoch)):
                F.cross_entropy(server.train()(z[chosen]), y[chosen]).backward()
                learns.step()
                learns.zero_grad(set_to_none=True)
    expected = {f"server/{name}": x for name, x in Slots(server).tensors().items()}
    for n, own in alone.items():
        for part, module in own.items():
            expected |= {f"clients/{n}/{part}/{name}": x for name, x in Slots(module).tensors().items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def _copy(setup, part):
    return copy.deepcopy(setup.modules[part]).train()


def test_the_bytes_are_features_logits_and_labels_alone(gkt):
    """Up N (|z| + 4C + label), down N 4C, in every round; no weight but the first download."""
    config = gkt(cohort=0.67, rounds=4, data={"partition": "dirichlet", "alpha": 0.5})
    result = run(config)
    setup = make_setup(config)
    (z,) = boundary(setup.modules["client"].eval()(setup.settings.task.plain_batch(setup.examples[0][:1]).inputs))
    expected, seen = {}, set()
    held = [setup.initial[part] for part in ("client", "auxiliary")]
    first = sum(x.numel() * x.element_size() for tensors in held for x in tensors.values())
    for t in range(config.rounds):
        for client in draw_cohort(config, t):
            count = len(setup.examples[client])
            if client not in seen:
                expected[t or -1, client, "down", "first download"] = first
            seen.add(client)
            expected[t, client, "up", "activations"] = count * 4 * z.numel()
            expected[t, client, "up", "logits"] = expected[t, client, "down", "logits"] = count * 4 * 10
            expected[t, client, "up", "labels"] = count * 8
    entries = RunDirectory(result.directory).ledger()
    assert {(e.round, e.client, e.direction, e.kind): e.bytes for e in entries} == expected
    assert len(seen) == 3
    assert any(t > 0 for t, _, _, kind in expected if kind == "first download")
    assert run_cost(config)["bytes_total"] == result.metrics[-1]["bytes_total"]


def test_cost_lists_it(gkt):
    config = gkt()
    table = cost(config)
    assert list(table) == list(ALGORITHMS)
    second = run(config).metrics[1]["bytes_total"] - run(gkt(rounds=1)).metrics[0]["bytes_total"]
    assert table["fedgkt"]["bytes_total"] == second


def test_it_is_evaluated_as_the_mean_over_the_clients(gkt):
    config = gkt(rounds=1)
    setup = make_setup(config)
    engine = LocalEngine(setup)
    federation = Federation(setup, engine)
    try:
        federation.play_round(0, [0, 1, 2])
        scores = federation.evaluate()
        weights = federation.merged()
    finally:
        engine.close()
    each = []
    for n in range(3):
        Slots(setup.modules["client"]).put(below(f"clients/{n}/client/", weights))
        Slots(setup.modules["server"]).put(below("server/", weights))
        task, right = setup.settings.task, 0.0
        with torch.no_grad():
            for index in range(task.test_batches()):
                batch = task.test_batch(index)
                z = boundary(setup.modules["client"].eval()(batch.inputs))
                output = setup.modules["server"].eval()(*z)
                right += task.score(output, batch.target)["correct"]
        each.append(right / 100)
    assert scores["test_accuracy"] == sum(each) / 3
    assert len(set(each)) > 1


def test_logits_are_known_by_example(gkt, monkeypatch):
    """A client is taught about each example by the server's logits of this very example."""
    config = gkt(data={"augment": False}, clients=2, workers=1)
    setup = make_setup(config)
    engine = LocalEngine(setup)
    federation = Federation(setup, engine)
    divergence, pairs = FedGKT._divergence, []
    try:
        federation.play_round(0, [0, 1])
        mail = {n: parts["logits"]["logits"] for n, parts in federation.post.waiting.items()}
        monkeypatch.setattr(
            FedGKT, "_divergence", lambda self, *given: pairs.append(given[1]) or divergence(self, *given)
        )
        federation.play_round(1, [0, 1])
    finally:
        engine.close()
    for n in (0, 1):
        for places in local_order(len(setup.examples[n]), config, n, 1):
            assert torch.equal(pairs.pop(0), mail[n][places])


def test_a_client_that_fails_leaves_nothing_behind(gkt, monkeypatch):
    """Its features of this round are not learnt from, and it gets no logits; the next round has it back."""
    local_round = FedGKT.local_round

    def fails_once(self, client, t):
        for number, upload in enumerate(local_round(self, client, t)):
            if (client.id, t, number) == (1, 0, 2):
                raise RuntimeError("no more")
            yield upload

    monkeypatch.setattr(FedGKT, "local_round", fails_once)
    config = gkt(on_client_failure="drop")
    result = run(config)
    assert [line["missing"] for line in result.metrics] == [[1], []]
    entries = RunDirectory(result.directory).ledger()
    down = {(e.round, e.client): e.bytes for e in entries if (e.direction, e.kind) == ("down", "logits")}
    assert down == dict.fromkeys([(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)], 50 * 4 * 10)


def test_resume_gives_the_same_run(gkt, monkeypatch):
    config = gkt(rounds=3)
    whole = run(config)
    other = gkt(rounds=3, workers=1)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(other)
    monkeypatch.undo()
    assert_same_run(whole.directory, resume(other.out).directory)


def test_the_dry_engine_computes_no_pass_twice(gkt):
    setup = make_dry_setup(gkt())
    calls = []
    hook = setup.modules["server"].register_forward_pre_hook(lambda module, z: calls.append(z[0].shape))
    try:
        Federation(setup, DryEngine(setup)).play_round(0, [0, 1, 2])
    finally:
        hook.remove()
    assert len(calls) == len(set(calls))


def test_what_cannot_be_is_refused(gkt):
    with pytest.raises(InputError, match="texts"):
        FedGKT(Config(algorithm="fedgkt", data=gkt().data.__class__(name="e2e")))
    with pytest.raises(InputError, match="nothing to learn"):
        gkt(server_kl=0.0, server_ce=0.0)
    with pytest.raises(InputError, match="takes one cut"):
        make_setup(gkt(model={"cut": "conv1,conv3"}))
    with pytest.raises(InputError, match="cannot run on Flower"):
        check(gkt(), Agreement())

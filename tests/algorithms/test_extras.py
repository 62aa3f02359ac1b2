"""What an algorithm may send with its updates, get back, keep at each role, and compute at a client."""

import pytest
import torch
from torch.nn import functional as F

from fsl_sage import ALGORITHMS, Algorithm, Smashed
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import TrainingError
from fsl_sage.experiment import Federation, resume, run
from fsl_sage.experiment.setup import make_dry_setup, make_setup
from fsl_sage.records.files import load_tensors

from ..test_experiment import assert_same_run, interrupt_after

CONTROLS = "control variates"


class Controlled(Algorithm):
    """Each client sends an array with its update; the F-server sends their mean back with the next weights."""

    averaged = ("client", "server")
    holds = ("client", "server")
    has_s_server = False

    def local_round(self, client, t):
        shift = client.received_extra.get(CONTROLS, {"c": torch.zeros(3)})["c"]
        for batch in client.batches(t):
            assert len(batch.examples) == len(batch.target["labels"])
            z = client.forward(batch)
            client.backward(z, client.server_gradient(z, batch.target))
            for weight in client.parameters("client").values():
                weight.grad.add_(shift.mean().to(weight.grad.device), alpha=1e-3)
            client.step()
        yield from ()

    def on_update(self, client, t):
        client.extra["seen"] = client.extra.get("seen", torch.zeros(())) + 1
        weight = next(iter(client.parameters("client").values()))
        return {CONTROLS: {"c": weight.detach().flatten()[:3].clone()}}

    def aggregate(self, f_server, updates):
        f_server.sends = {CONTROLS: {"c": torch.stack([u.extra[CONTROLS]["c"] for u in updates]).mean(0)}}
        f_server.extra["rounds"] = f_server.extra.get("rounds", torch.zeros(())) + 1
        return f_server.mean(updates)


class OwnLoss(Algorithm):
    """A client computes any part's output and trains on any loss of it; the S-server keeps something of its own."""

    averaged = ("client", "auxiliary")
    holds = ("client", "auxiliary")

    def local_round(self, client, t):
        for batch in client.batches(t):
            z = client.forward(batch)
            logits = client.output("auxiliary", *z)
            if not logits.is_meta:
                F.cross_entropy(logits, batch.target["labels"]).backward()
            client.step()
        yield Smashed(tuple(x.detach() for x in z), batch.target)

    def on_upload(self, server, client, upload):
        server.learn(client, upload)
        server.extra["uploads"] = server.extra.get("uploads", torch.zeros(())) + 1


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "controlled", Controlled)
    monkeypatch.setitem(ALGORITHMS, "own-loss", OwnLoss)


def test_arrays_go_up_with_the_update_and_come_back_and_are_billed(tiny):
    config = tiny(algorithm="controlled", rounds=3)
    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    for t in range(3):
        federation.play_round(t, [0, 1, 2])
        assert federation.ledger.by_kind(t)[CONTROLS] == {"up": 3 * 12, "down": 3 * 12}
    federation.engine.close()
    dry = make_dry_setup(config)
    costs = Federation(dry, DryEngine(dry))
    for t in range(3):
        costs.play_round(t, [0, 1, 2])
    assert [costs.ledger.entries(t) for t in range(-1, 3)] == [federation.ledger.entries(t) for t in range(-1, 3)]


@pytest.mark.parametrize("algorithm", ["controlled", "own-loss"])
def test_what_each_role_keeps_is_resumed(tiny, monkeypatch, algorithm):
    changes = {"algorithm": algorithm, "rounds": 4, "cohort": 0.67, "keep_checkpoint": True}
    whole = run(tiny(**changes)).directory
    config = tiny(**changes)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    monkeypatch.setitem(ALGORITHMS, "controlled", Controlled)
    monkeypatch.setitem(ALGORITHMS, "own-loss", OwnLoss)
    resume(config.out)
    assert_same_run(whole, config.out)
    kept, _ = load_tensors(config.out / "checkpoint.safetensors")
    path = "f_server/extra/rounds" if algorithm == "controlled" else "engine/server/extra/uploads"
    assert float(kept[path]) == (4 if algorithm == "controlled" else 8)


def test_any_loss_of_any_part_trains_it(tiny):
    """With the usual loss it is what CSE-FSL does."""
    own = run(tiny(algorithm="own-loss"))
    cse = run(tiny(algorithm="cse-fsl", upload_every=1000))
    first, second = (load_tensors(result.model_file)[0] for result in (own, cse))
    assert all(torch.equal(first[name], second[name]) for name in first if name.startswith("block1"))


class Twice(Algorithm):
    """Uploads two halves of a batch in one step."""

    averaged = holds = ("client",)
    waits = False

    def local_round(self, client, t):
        for batch in client.batches(t):
            z = client.forward(batch)
            yield Smashed(z, batch.target)
            yield Smashed(z, batch.target)
            client.backward(z, tuple(torch.zeros_like(x) for x in z))
            client.step()

    def on_upload(self, server, client, upload):
        server.learn(client, upload)


def test_a_second_upload_of_a_step_is_refused(tiny, monkeypatch):
    """It was taken for a repeat of the first, and dropped without a word."""
    monkeypatch.setitem(ALGORITHMS, "twice", Twice)
    with pytest.raises(TrainingError, match="twice uploads twice in one local step, and its clients do not wait"):
        run(tiny(algorithm="twice", rounds=1))

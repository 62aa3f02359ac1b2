"""A worker runs clients' rounds: uploads carry their step, whatever a client's code raises is its outcome."""

import pytest
import torch

from fsl_sage.algorithms.fsl_sage import FSLSAGE
from fsl_sage.engines.base import ClientError, Delivery, Outcome
from fsl_sage.engines.worker import Worker, evaluate
from fsl_sage.experiment.setup import make_setup
from fsl_sage.wire.message import Message


@pytest.fixture
def setup(tiny):
    return make_setup(tiny(upload_every=2))


def delivery(setup):
    return Delivery({part: setup.initial[part] for part in setup.algorithm.averaged}, {})


def test_a_round_that_nobody_waits_for(setup):
    sent = []
    outcome = Worker(setup).whole_round(0, 1, {}, delivery(setup), sent.append)
    assert isinstance(outcome, Outcome)
    assert [upload.values["step"] for upload in sent] == [0, 2]  # 50 images in batches of 16: steps 0 to 3
    assert outcome.update.client == 1
    assert outcome.update.parts.keys() == {"client"}
    assert outcome.update.losses.keys() == {"client_loss"}


def test_step_by_step_it_is_the_same_round(setup):
    worker = Worker(setup)
    whole = worker.whole_round(0, 1, {}, delivery(setup), lambda upload: None)
    conversation = Worker(setup).converse(0, 1, {}, delivery(setup))
    uploads = []
    while isinstance(said := conversation(None), Message):
        uploads.append(said)
    for name, tensor in whole.update.parts["client"].items():
        assert torch.equal(tensor, said.update.parts["client"][name])
    assert len(uploads) == 2


def test_what_a_clients_code_raises_is_its_outcome(setup, monkeypatch):
    def broken(self, client, t):
        yield from ()
        raise ValueError("the disk is full")

    monkeypatch.setattr(FSLSAGE, "local_round", broken)
    outcome = Worker(setup).whole_round(4, 2, {}, delivery(setup), lambda upload: None)
    assert isinstance(outcome, ClientError)
    assert str(outcome) == "Client 2 failed in round 4: ValueError: the disk is full (test_worker.py, line 47)"
    assert "in broken" in outcome.__notes__[0]


def test_evaluation_does_not_depend_on_who_takes_which_batch(setup):
    worker = Worker(setup)
    parts = {part: setup.initial[part] for part in ("client", "server")}

    def in_turn(job, shared, items):
        return [job(worker.workbench, setup.settings, shared, item) for item in items]

    def backwards(job, shared, items):
        return list(reversed(in_turn(job, shared, list(reversed(items)))))

    scores = evaluate(setup.settings, parts, in_turn)
    assert scores == evaluate(setup.settings, parts, backwards)
    assert 0 <= scores["test_accuracy"] <= 1


def test_a_worker_holds_the_parts_that_its_work_needs_and_their_weights_once(tiny) -> None:
    """Of the modules on its bench only those that were used are there, and the weights are the client's own."""
    setup = make_setup(tiny(algorithm="fedavg", rounds=1))
    worker = Worker(setup)
    assert not worker.workbench.slots
    uploads: list[Message] = []
    outcome = worker.whole_round(0, 0, {}, Delivery(setup.initial, {}), uploads.append)
    assert isinstance(outcome, Outcome)
    assert set(worker.workbench.slots) == {"client", "server"}
    bench = worker.workbench.slots["client"]
    assert all(
        tensor.data_ptr() == bench.tensors()[name].data_ptr() for name, tensor in outcome.update.parts["client"].items()
    )
    assert all(tensor.is_meta for tensor in Worker(setup).workbench.slots["auxiliary"].tensors().values())

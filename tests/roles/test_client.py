"""A client during one round: made from its state and the weights that came down."""

import pytest
import torch

from fsl_sage.experiment.setup import make_setup
from fsl_sage.roles.client import Client, _pull
from fsl_sage.roles.work import Workbench


@pytest.fixture
def client(tiny):
    """Makes client 0 of a federation, with a state; by default it trains its client part alone."""

    def make(state=None, trains=("client",), received=None, **changes):
        setup = make_setup(tiny(**changes))
        initial = {part: setup.initial[part] for part in ("client", "auxiliary")}
        arguments = (0, setup.examples[0], setup.settings, Workbench(setup.modules))
        return Client(*arguments, received or {}, initial, state or {}, trains)

    return make


def local_step(client, t=0):
    batch = next(client.batches(t))
    z = client.forward(batch)
    client.backward(z, client.auxiliary_gradient(z, batch.target))
    client.step()
    return batch


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_batch_knows_its_examples_and_every_example_comes_once_an_epoch(client):
    one = client()
    batches = list(one.batches(3))
    seen = torch.cat([batch.examples for batch in batches])
    assert sorted(seen.tolist()) == sorted(one.examples.tolist())
    assert [len(batch.examples) for batch in batches] == [len(batch.target["labels"]) for batch in batches]
    assert (one.round, one.step_index) == (3, len(batches) - 1)


def test_a_step_trains_the_parts_that_it_trains_and_no_other(client):
    one = client()
    before = {part: copied(one.upload((part,))[part]) for part in ("client", "auxiliary")}
    local_step(one)
    assert not same(one.upload(("client",))["client"], before["client"])
    assert same(one.upload(("auxiliary",))["auxiliary"], before["auxiliary"])
    both = client(trains=("client", "auxiliary"))
    local_step(both)
    assert not same(both.upload(("auxiliary",))["auxiliary"], before["auxiliary"])


def test_the_weights_that_came_down_are_taken_and_not_written_on(client):
    received = {"client": {name: torch.randn_like(x) if x.is_floating_point() else x
                           for name, x in copied(client().upload(("client",))["client"]).items()}}  # fmt: skip
    kept = copied(received["client"])
    one = client(received=received)
    assert same(one.upload(("client",))["client"], kept)
    local_step(one)
    assert same(received["client"], kept)


def test_its_state_has_what_the_next_round_needs_and_no_averaged_weight(client):
    one = client(trains=("client", "auxiliary"))
    one.extra["note"] = torch.ones(2)
    local_step(one)
    state = one.state(("client",))
    kinds = {path.split("/")[0] for path in state}
    assert kinds == {"optimizer", "own", "extra"}
    assert not any(path.startswith("own/client/") for path in state)
    again = client(state=state, trains=("client", "auxiliary"))
    assert torch.equal(again.extra["note"], torch.ones(2))
    assert same(again.upload(("auxiliary",))["auxiliary"], one.upload(("auxiliary",))["auxiliary"])
    steps = [value for path, value in again.state(("client",)).items() if path.endswith("/step")]
    assert {float(step) for step in steps} == {1.0}


def test_a_replaced_part_keeps_its_optimizer_where_it_is_trained(client):
    one = client(trains=("client", "auxiliary"))
    local_step(one)
    other = {name: torch.full_like(x, 2) for name, x in one.upload(("auxiliary",))["auxiliary"].items()}
    one.replace("auxiliary", other)
    assert same(one.upload(("auxiliary",))["auxiliary"], other)
    assert any(path.startswith("optimizer/auxiliary/") for path in one.state(("client",)))
    frozen = client()
    frozen.replace("auxiliary", other)
    assert same(frozen._own["auxiliary"], other)


def test_the_output_of_a_part_has_a_graph_that_any_loss_may_use(client):
    one = client(trains=("client", "auxiliary"))
    batch = next(one.batches(0))
    z = one.forward(batch)
    logits = one.output("auxiliary", *z)
    assert logits.shape == (len(batch.examples), 10)
    logits.square().mean().backward()
    gradients = [weight.grad for part in ("client", "auxiliary") for weight in one.parameters(part).values()]
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_a_sample_that_was_all_zero_is_not_pulled():
    """A row that no ReLU let through has no size by which a distance from it could be measured."""
    then = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    pull = _pull(torch.full((2, 2), 0.1), then)
    torch.testing.assert_close(pull, torch.tensor([[0.0, 0.0], [-0.9, -0.9]]))

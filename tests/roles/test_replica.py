import torch
from torch import nn

from fsl_sage.roles.replica import Replica, Slots


def adam(parameters):
    return torch.optim.Adam(parameters, fused=True)


def module():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_graph_stays_valid_while_another_replica_is_in():
    slots = Slots(module())
    start = slots.tensors()
    one, two = (Replica(slots, start, adam) for _ in range(2))
    x = torch.randn(5, 3)
    output = one.module()(x)
    two.module()(x + 1).sum().backward()
    two.step(0.1)
    output.square().sum().backward()
    alone = Replica(Slots(module()), start, adam)
    alone.module()(x).square().sum().backward()
    for name, parameter in one.parameters().items():
        assert torch.equal(parameter.grad, alone.parameters()[name].grad)


def test_training_a_replica_leaves_the_weights_it_came_from():
    slots = Slots(module())
    start = {name: tensor.clone() for name, tensor in slots.tensors().items()}
    shared = slots.tensors()
    replica = Replica(slots, shared, adam)
    replica.module()(torch.randn(5, 3)).sum().backward()
    replica.step(0.1)
    assert all(torch.equal(shared[name], start[name]) for name in start)
    assert not torch.equal(replica.weights()["0.weight"], start["0.weight"])


def test_optimizer_state_moves_to_another_replica():
    torch.manual_seed(0)
    slots, x = Slots(module()), torch.randn(5, 3)
    whole = Replica(slots, slots.tensors(), adam)
    halves = Replica(slots, slots.tensors(), adam)
    for step in range(4):
        if step == 2:
            state = halves.optimizer_state()
            halves = Replica(slots, halves.weights(), adam)
            halves.load_optimizer_state(state)
        for replica in (whole, halves):
            replica.module()(x).square().sum().backward()
            replica.step(0.01)
    assert all(torch.equal(whole.weights()[name], tensor) for name, tensor in halves.weights().items())


def test_frozen_weights_do_not_travel_and_tied_ones_travel_once():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].requires_grad_(False)
    net[2].weight = net[1].weight
    slots = Slots(net)
    assert set(slots.tensors()) == {"1.weight", "1.bias", "2.bias"}
    replica = Replica(slots, slots.tensors(), adam)
    replica.module()
    assert net[2].weight is net[1].weight is replica.tensors["1.weight"]


def test_the_order_of_weights_is_the_models_not_that_of_a_file():
    """The norm of all gradients, by which an alignment clips, is summed in this order."""
    slots = Slots(module())
    tensors = slots.tensors()
    from_file = Replica(slots, dict(sorted(tensors.items(), reverse=True)), adam)
    assert list(from_file.tensors) == list(Replica(slots, tensors, adam).tensors)

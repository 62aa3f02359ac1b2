"""The passes of one training step, of a whole model and through a cut, to be compared."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.split import Split
from fsl_sage.split.trace.skeleton import named_tensors, set_tensor, tensor_leaves
from tests.split.families import Example


def call(model: Any, example: Example) -> Any:
    return model(**example) if isinstance(example, dict) else model(example)


def loss_of(output: Any) -> Tensor:
    """A loss in which every element of the output counts differently."""
    terms = [t for t in tensor_leaves(output) if t.is_floating_point() and t.requires_grad]
    return torch.stack([(t * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in terms]).sum()


def gradients_of(model: nn.Module, output: Any) -> dict[str, Tensor]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss_of(output), list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


def whole_step(model: nn.Module, example: Example, untied: tuple[str, ...]) -> Any:
    """Outputs, gradients and state after one training step's passes of the unsplit model."""
    model = copy.deepcopy(model)
    for name in untied:
        set_tensor(model, name, nn.Parameter(named_tensors(model)[name].detach().clone()))
    output = call(model, example)
    return tensor_leaves(output), gradients_of(model, output), model.state_dict()


def split_step(split: Split, example: Example) -> Any:
    """The same through the cut, with only the boundary's tensors and their gradients passing."""
    boundary = call(split.client, example)
    received = boundary.detached()
    output = split.server(received.tensors if split.plan.tensors_tell_shapes else received)
    server = {name: p for name, p in split.server.named_parameters() if p.requires_grad}
    leaves = [t for t in received.tensors if t.requires_grad]
    found = torch.autograd.grad(loss_of(output), [*leaves, *server.values()], allow_unused=True)
    gradients = dict(zip(server, found[len(leaves) :], strict=True))
    smashed = [t for t in boundary.tensors if t.is_floating_point()]
    sent = [(t, g) for t, g in zip(smashed, found, strict=False) if t.requires_grad and g is not None]
    client = {name: p for name, p in split.client.named_parameters() if p.requires_grad}
    if sent:
        outputs, cut_gradients = zip(*sent, strict=True)
        back = torch.autograd.grad(outputs, list(client.values()), cut_gradients, allow_unused=True)
        gradients |= dict(zip(client, back, strict=True))
    return tensor_leaves(output), {n: g for n, g in gradients.items() if g is not None}, split.merged().state_dict()


def assert_same_bits(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different

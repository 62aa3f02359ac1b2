"""A training pass through a model of the user's own, tried before a run: what the run has to know of it, or refuse.

A client is its named tensors: parameters and buffers of the `state_dict`. They go from a client's round into the next
one, into checkpoints and to other processes. What else a forward pass changes stays in a module that many clients use
in turn, so one client's would reach the others, the numbers would depend on the number of workers, and a resumed run
would begin without it. So it is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fsl_sage.models.norm import without_trace
from fsl_sage.roles.work import boundary
from fsl_sage.split import Part, passage

Place = tuple[nn.Module, str]
"""A module and the name of an attribute."""


@torch.no_grad()
def moves_generators(parts: Sequence[nn.Module], example: Any, device: torch.device) -> bool:
    """Whether a training pass through these parts draws random numbers. Nothing is changed by it.

    Where no pass is possible by itself it is taken to draw: then passes are seeded, and clients train one by one.
    """

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    with _in_training(parts), _without_trace(parts, device):
        before = states()
        try:
            _output(parts, example)
        except Exception:
            return True
        return any(not torch.equal(one, other) for one, other in zip(before, states(), strict=True))


@torch.no_grad()
def hidden_state(parts: Sequence[nn.Module], example: Any, device: torch.device) -> str | None:
    """What a training pass changes that is in no `state_dict`, in a sentence; None if nothing was found.

    Found are buffers that are not saved or are exchanged for others, and plain numbers of modules on which a second
    pass from the same state depends. Nothing is changed by it.
    """
    before = _numbers(parts)
    with _in_training(parts):
        with _without_trace(parts, device):
            buffers = {place: (x, x.clone()) for place, x in _buffers(parts)}
            try:
                first = _output(parts, example)
            except Exception:
                return None  # training will say it
            if (found := _lost(buffers, dict(_buffers(parts)))) is not None:
                return found
        moved = [place for place, value in _numbers(parts).items() if before.get(place, value) != value]
        with _without_trace(parts, device):
            second = _output(parts, example) if moved else first
    if all(map(_same, _tensors(second), _tensors(first))):
        return None
    child, name = moved[0]
    return f"'{name}' of {_name(child)} is a plain number: make it a buffer, and change that in place"


def _lost(before: Mapping[Place, tuple[Tensor, Tensor]], now: Mapping[Place, Tensor]) -> str | None:
    """A buffer whose change no replica would have; `before` has the buffers, and copies of them."""
    for (child, key), (x, value) in before.items():
        found = now.get((child, key))
        if _same(found, value):
            continue
        if key in child._non_persistent_buffers_set:
            return f"'{key}' of {_name(child)} is a buffer that is not saved: register it as persistent"
        if found is not x:
            return f"'{key}' of {_name(child)} is exchanged for another tensor: change it in place"
    return None


@contextmanager
def _in_training(parts: Sequence[nn.Module]) -> Iterator[None]:
    """The parts in training mode. Modes and plain numbers are as before afterwards."""
    modes = {module: module.training for part in parts for module in part.modules()}
    numbers = _numbers(parts)
    try:
        for part in parts:
            part.train()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for (child, name), value in _numbers(parts).items():
            if (before := numbers.get((child, name), value)) != value:
                setattr(child, name, before)


@contextmanager
def _without_trace(parts: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Buffers and generators are as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), ExitStack() as stack:
        for part in parts:
            stack.enter_context(without_trace(part))
        yield


def _output(parts: Sequence[nn.Module], example: Any) -> Any:
    inputs = pytree.tree_map(partial(_in_precision_of, parts[0]), example)
    output = parts[0](**inputs) if isinstance(inputs, Mapping) else parts[0](inputs)
    for part in parts[1:]:
        output = part(*boundary(output))
    return output


def _in_precision_of(part: nn.Module, leaf: Any) -> Any:
    weight = next((weight for weight in part.parameters() if weight.is_floating_point()), None)
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(weight.dtype) if is_float and weight is not None else leaf


def _children(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules whose code runs."""
    models = (passage(part).model if isinstance(part, Part) else part for part in parts)
    return list(dict.fromkeys(child for model in models for child in model.modules()))


def _buffers(parts: Sequence[nn.Module]) -> list[tuple[Place, Tensor]]:
    return [((child, key), x) for child in _children(parts) for key, x in child._buffers.items() if x is not None]


def _numbers(parts: Sequence[nn.Module]) -> dict[Place, float]:
    """Plain numbers that modules have as attributes."""
    return {
        (child, name): value
        for child in _children(parts)
        for name, value in vars(child).items()
        if isinstance(value, (int, float)) and name != "training"
    }


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _same(one: Tensor | None, other: Tensor) -> bool:
    if one is None or one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _name(module: nn.Module) -> str:
    return type(module).__name__

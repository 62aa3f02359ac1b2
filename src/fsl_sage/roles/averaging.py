"""The one place that averages weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsl_sage.precision import wide
from fsl_sage.wire.message import Tensors


def average(states: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The weighted mean of each tensor over the states that hold it, summed in the order given.

    BatchNorm statistics are averaged like weights, in float; integer step counters are not averaged, the largest is
    kept. Sums run in float64, so that the mean of equal tensors is that tensor.
    """
    names = dict.fromkeys(name for state in states for name in state)
    return {name: _average_one(name, states, weights) for name in names}


def _average_one(name: str, states: Sequence[Tensors], weights: Sequence[float]) -> Tensor:
    holders = [(state[name], weight) for state, weight in zip(states, weights, strict=True) if name in state]
    first = holders[0][0]
    if not first.is_floating_point():
        return torch.stack([tensor for tensor, _ in holders]).amax(0)
    whole = sum(weight for _, weight in holders)
    total = torch.zeros_like(wide(first))
    for tensor, weight in holders:
        total.add_(tensor, alpha=weight / whole)
    return total.to(first.dtype)

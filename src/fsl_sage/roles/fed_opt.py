"""FedOpt (Reddi et al., 2021, Algorithm 2): the F-server takes a step of an optimizer towards the clients' average."""

from collections.abc import Callable

import torch
from torch import Tensor

from fsl_sage.config import AveragingConfig
from fsl_sage.precision import wide
from fsl_sage.wire.message import Tensors

SecondMoment = Callable[[Tensor, Tensor, float], Tensor]
"""From v, the squares of the changes and beta2 to the new v."""

SECOND_MOMENTS: dict[str, SecondMoment] = {
    "adagrad": lambda v, square, beta2: v + square,
    "adam": lambda v, square, beta2: beta2 * v + (1 - beta2) * square,
    "yogi": lambda v, square, beta2: v - (1 - beta2) * square * (v - square).sign(),
}


def step(options: AveragingConfig, x: Tensors, average: Tensors, state: Tensors) -> Tensors:
    """Take one step from x along average - x. Sums run in float64, and so does the state.

    Args:
        options: Which optimizer, and its numbers.
        x: The weights before this round, by path.
        average: What the clients' weights are averaged to, by the same paths.
        state: `m/PATH` and `v/PATH`, which are empty before the first step, and are renewed.
    """
    return {path: _step(options, wide(x[path]), mean, state, path).to(mean.dtype) for path, mean in average.items()}


def _step(options: AveragingConfig, x: Tensor, average: Tensor, state: Tensors, path: str) -> Tensor:
    if x.is_meta:  # a dry run: the step has this shape, and torch would take long to compute it
        return x
    delta = wide(average) - x
    m = state.get(f"m/{path}", torch.zeros_like(delta))
    if options.optimizer in (None, "sgd"):
        state[f"m/{path}"] = m = options.momentum * m + delta
        return x + options.rate * m
    v = state.get(f"v/{path}", torch.full_like(delta, options.tau**2))
    state[f"m/{path}"] = m = options.beta1 * m + (1 - options.beta1) * delta
    state[f"v/{path}"] = v = SECOND_MOMENTS[str(options.optimizer)](v, delta.square(), options.beta2)
    return x + options.rate * m / (v.sqrt() + options.tau)

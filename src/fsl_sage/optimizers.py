"""The one place that makes optimizers, and the check that guards their fused kernels.

A fused optimizer goes over the memory once instead of several times. torch's fused kernels for the CPU read weights,
gradients and states linearly, as they lie in memory, and do not look at strides. A gradient that has the right values
but other strides than its weight is silently scrambled: every element gets another element's gradient. Gradients that
`torch.autograd.grad` returns from a double backward through convolutions are like that; `.backward()` into a `.grad`
that is None keeps the layout of the weight. Every optimizer made here looks before each step, and refuses.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

OptimizerName = Literal["adam", "adamw", "sgd"]


class LayoutError(RuntimeError):
    """A fused optimizer was about to read a tensor in the wrong order."""


def make_optimizer(
    name: OptimizerName, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float, momentum: float = 0.0
) -> torch.optim.Optimizer:
    """An optimizer of torch, fused where torch has such a kernel; `momentum` is for sgd alone."""
    parameters = list(parameters)
    # Exact, and elementwise, so that its bits don't depend on threads.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "fused": fused}
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(parameters, momentum=momentum, **options)
    else:
        optimizer = (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(parameters, **options)
    if fused:
        optimizer.register_step_pre_hook(_check_layouts)
    if fused and momentum:
        optimizer.register_step_pre_hook(_complete_momentum)
    return optimizer


def state_shapes(name: OptimizerName, weights: Mapping[str, Tensor], momentum: float) -> dict[str, Tensor]:
    """What an optimizer remembers of weights after a step: shapes by "weight's name/entry"; Adam counts its steps."""
    entries = {"sgd": ("momentum_buffer",) if momentum else ()}.get(name, ("step", "exp_avg", "exp_avg_sq"))

    def shape(weight: Tensor, entry: str) -> Tensor:
        if entry == "step":
            return torch.empty((), dtype=torch.float32, device="meta")
        return torch.empty_like(weight, device="meta", requires_grad=False)

    return {f"{path}/{entry}": shape(weight, entry) for path, weight in weights.items() for entry in entries}


def in_layout_of(weight: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` with the strides of `weight`, which has the same shape; a copy only where they differ."""
    if tensor.shape != weight.shape or has_layout_of(weight, tensor):
        return tensor
    strided = torch.empty_strided(weight.shape, weight.stride(), dtype=tensor.dtype, device=tensor.device)
    return strided.copy_(tensor)


def has_layout_of(weight: Tensor, tensor: Tensor) -> bool:
    """Whether both lie in memory in the same order; along a dimension of size 1 strides mean nothing."""
    if weight.stride() == tensor.stride():
        return True
    return all(
        size == 1 or own == other
        for size, own, other in zip(weight.shape, weight.stride(), tensor.stride(), strict=True)
    )


def _complete_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give weights that get their first gradient later than others a momentum of 0, which is what they have.

    torch's fused kernel makes such buffers for all weights at once, or for none.
    """
    stepping = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    missing = [weight for weight in stepping if "momentum_buffer" not in optimizer.state.get(weight, {})]
    if len(missing) < len(stepping):
        for weight in missing:
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def _check_layouts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of a fused optimizer: gradients and states lie in memory as their weights do."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is None:
                continue
            _check(weight, weight.grad, "gradient")
            for entry, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    _check(weight, value, f"optimizer state '{entry}'")


def _check(weight: Tensor, tensor: Tensor, what: str) -> None:
    if not has_layout_of(weight, tensor):
        raise LayoutError(
            f"The {what} of a weight {list(weight.shape)} has the strides {tensor.stride()}, the weight has "
            f"{weight.stride()}: a fused optimizer would give each element another one's value. Set .grad to None and "
            "call torch.autograd.backward(loss, inputs=weights), or bring the tensor into the weight's layout."
        )

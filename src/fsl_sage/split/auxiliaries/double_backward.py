"""Whether an auxiliary model can be differentiated twice, as alignment does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fsl_sage.models.attention import twice_differentiable_attention
from fsl_sage.split.auxiliaries.rehearsal import rehearse
from fsl_sage.split.errors import SplitError, without_tensor
from fsl_sage.split.parts.gates import Boundary
from fsl_sage.split.parts.part import Split
from fsl_sage.split.trace.skeleton import tensor_leaves


def try_double_backward(made: nn.Module, split: Split) -> None:
    """Refuse an auxiliary with operations that have no second derivative, by name."""
    missing = _without_double_backward(made, split)
    if missing:
        raise SplitError(
            f"the auxiliary model cannot be aligned: {', '.join(missing)} cannot be differentiated twice; use "
            "other layers there, or pass aligned=False for algorithms that do not align"
        )


def _without_double_backward(made: nn.Module, split: Split) -> list[str]:
    """The operations in the auxiliary's backward pass whose derivative torch does not know."""

    def run(module: nn.Module, tensors: tuple[Tensor, ...]) -> list[str]:
        boundary = Boundary(tensors).detached()
        smashed = [tensor for tensor in boundary.tensors if tensor.requires_grad]
        with torch.enable_grad(), twice_differentiable_attention():
            output = _as_aligned(module, boundary)
            outputs = [tensor for tensor in tensor_leaves(output) if tensor.requires_grad]
            if not outputs:
                raise without_tensor(output)
            loss = torch.stack([output.square().mean() for output in outputs]).sum()
            found = torch.autograd.grad(loss, smashed, create_graph=True, allow_unused=True)
            gradients = [gradient for gradient in found if gradient is not None]
            missing = {name for gradient in gradients for name in _missing_from(gradient)}
            return sorted(missing) or _tried(gradients, smashed)

    return rehearse(made, split.plan.cuts[0], split.example, run)


def _tried(gradients: list[Tensor], smashed: list[Tensor]) -> list[str]:
    """Some operations show only when they run that they have no second derivative."""
    distances = [gradient.square().sum() for gradient in gradients if gradient.requires_grad]
    try:
        if distances:
            torch.autograd.grad(torch.stack(distances).sum(), smashed, allow_unused=True)
    except RuntimeError as error:
        if "derivative" not in str(error):
            raise
        return [_operation_in(error)]
    return []


def _as_aligned(module: nn.Module, boundary: Boundary) -> Any:
    """A pass as alignment does it: BatchNorm by the batch, unless one sample is all there is, and no dropout."""
    module.train()
    for inner in module.modules():
        if isinstance(inner, _DropoutNd):
            inner.eval()
    try:
        return module(boundary)
    except ValueError:
        return module.eval()(boundary)


def _missing_from(gradient: Tensor) -> Iterator[str]:
    seen, pending = set(), [gradient.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        if node.name().endswith(("::NotImplemented", "::Error")):
            yield _name_of(node)


def _name_of(node: Any) -> str:
    """The operation behind a node that can only fail: it names it when it is asked to run."""
    try:
        node(*(torch.zeros(()) for _ in node._input_metadata))
    except RuntimeError as error:
        return _operation_in(error)
    return str(node.name())


def _operation_in(error: RuntimeError) -> str:
    found = re.search(r"derivative for (?:aten::|')(\w+)", str(error))
    return f"aten::{found[1]}" if found else "a function marked @once_differentiable"

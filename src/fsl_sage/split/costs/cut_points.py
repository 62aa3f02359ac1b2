"""Where to cut: every cut that works, with what it costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fsl_sage.split.costs.profile import Step, training_step
from fsl_sage.split.plan.analysis import Analysis
from fsl_sage.split.plan.split_plan import BoundaryTensor


@dataclass(frozen=True)
class CutPoint:
    """One cut. A step is a forward and backward pass of the example's batch, in training."""

    name: str
    """Usable as `cut` in `split_model`."""
    tensors: tuple[BoundaryTensor, ...]
    """What crosses."""
    client_parameters: int
    server_parameters: int
    client_bytes: int
    """Of the state_dict: parameters and buffers."""
    server_bytes: int
    client_trainable_bytes: int
    server_trainable_bytes: int
    activation_bytes: int
    """What crosses, per sample."""
    client_flops: int
    """Per step, the backward pass included; a multiplication and an addition are two."""
    server_flops: int
    client_memory: int
    """The peak of a step on the client: see `client_memory`."""
    untied: tuple[str, ...] = ()
    """Weights tied across the cut: they count on both sides, and `split_model` needs tied="untie"."""


def cut_points(
    model: nn.Module,
    example: Tensor | Mapping[str, Any] | tuple[Any, ...],
    *,
    private: Collection[str] = (),
) -> list[CutPoint]:
    """Every cut that works, in the order of the forward pass.

    Args:
        model: Any module, possibly on the meta device. It is run on the example without gradients.
        example: A batch: a tensor [B, ...], a dict of keyword inputs, or a tuple of positional ones.
        private: Inputs that must not cross a cut, besides the main one, which never does.

    Returns:
        For each cut its name, the sizes of both sides, what crosses, and FLOPs and memory of a training step.
    """
    return cut_points_of(Analysis(model, example, private))


def cut_points_of(analysis: Analysis, step: Step | None = None) -> list[CutPoint]:
    """As `cut_points`, for an analysed model and, if it is known, its training step."""
    step = step or training_step(analysis)
    return [_cut_point(analysis, step, name) for name in analysis.cut_names]


def client_memory(state: int, trainable: int, inputs: int, peak: int) -> int:
    """The bytes of a client that trains with Adam: its state, two moments, a batch, and the peak of the two passes.

    The peak holds activations kept for the backward pass, temporary tensors and the gradients of the parameters. The
    gradients are freed before the next forward pass (`zero_grad(set_to_none=True)`). Work space inside of kernels and
    of the allocator is not counted.
    """
    return state + 2 * trainable + inputs + max(peak, trainable)


def _cut_point(analysis: Analysis, step: Step, name: str) -> CutPoint:
    parts, untied = analysis.parts([name], tied="untie")
    client, server = (_Held.of(analysis, names) for names in parts.values())
    tensors = analysis.boundary(name)
    inputs = sum(map(_bytes, (leaf for leaf in analysis.inputs.leaves if isinstance(leaf, Tensor))))
    client_flops = step.client_flops(name)
    peak = step.client_peak(name, server.trainable_bytes)
    return CutPoint(
        name=name,
        tensors=tensors,
        client_parameters=client.parameters,
        server_parameters=server.parameters,
        client_bytes=client.saved_bytes,
        server_bytes=server.saved_bytes,
        client_trainable_bytes=client.trainable_bytes,
        server_trainable_bytes=server.trainable_bytes,
        activation_bytes=sum(tensor.nbytes for tensor in tensors) // analysis.inputs.batch,
        client_flops=client_flops,
        server_flops=step.server_flops(name),
        client_memory=client_memory(client.all_bytes, client.trainable_bytes, inputs, peak),
        untied=untied,
    )


@dataclass(frozen=True)
class _Held:
    """What one side holds."""

    parameters: int
    saved_bytes: int
    all_bytes: int
    trainable_bytes: int

    @classmethod
    def of(cls, analysis: Analysis, names: Iterable[str]) -> _Held:
        """The sizes of these tensors. What several names share counts once, but in saved bytes."""
        held = {name: analysis.tensors[name] for name in names}
        unique = {id(tensor): tensor for tensor in held.values()}.values()
        return cls(
            parameters=sum(tensor.numel() for tensor in unique if isinstance(tensor, nn.Parameter)),
            saved_bytes=sum(_bytes(tensor) for name, tensor in held.items() if name in analysis.saved),
            all_bytes=sum(map(_bytes, unique)),
            trainable_bytes=sum(_bytes(tensor) for tensor in unique if tensor.requires_grad),
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

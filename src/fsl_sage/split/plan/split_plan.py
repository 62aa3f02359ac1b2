"""The plan of a split: what crosses and who holds what, as plain data that can be written down as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsl_sage.split.errors import SplitError

Shape = tuple[int, ...]
Plain = bool | int | float | str | None


@dataclass(frozen=True)
class Dimension:
    """A dimension of a placeholder: `size`, or where `tensor` is set, `size` / `per` times that boundary dimension."""

    size: int
    per: int = 1
    tensor: int | None = None
    dimension: int = 0
    known: bool = True
    """False where the boundary tensors do not tell it, and `size` is only that of the example."""

    def of(self, tensors: Sequence[Tensor]) -> int:
        """The size of the dimension, given the boundary tensors."""
        if self.tensor is None:
            return self.size
        return tensors[self.tensor].shape[self.dimension] * self.size // self.per


@dataclass(frozen=True)
class LeafPlan:
    """A leaf of the model's inputs or of what a module returned: a tensor's type and shape, or a plain value."""

    dtype: str | None
    """None for a plain value."""
    shape: tuple[Dimension, ...] = ()
    value: Plain = None


@dataclass(frozen=True)
class CallPlan:
    """A module call before the cut, as the side behind the cut sees it: the `nth` one made by code that runs there."""

    module: str
    nth: int
    structure: str
    """What it returns, as a torch pytree specification."""
    leaves: tuple[LeafPlan, ...]


@dataclass(frozen=True)
class BoundaryTensor:
    """One array that travels."""

    name: str
    module: str | None
    """The module that returned it; None for an input that is sent along."""
    nth: int
    leaf: int
    """Its position among the leaves of what the module returned, or of the inputs."""
    shape: Shape
    """Its shape in the example, as it travels."""
    dtype: str
    batched: bool
    """Whether its first dimension grows with the batch."""
    copied: bool
    """Whether it is copied before use, because the model changes it in place."""
    sent_as_returned: bool = False
    """Whether it is also copied when the module returns it, because it changes before the cut."""
    batch_dimension: int = 0
    """The dimension of the samples in the model. It travels as the first one."""
    for_each: bool = False
    """Whether the model has one for the whole batch, [1, ...], and each sample is sent its own."""

    def as_sent(self, tensor: Tensor, batch: int) -> Tensor:
        """The model's tensor in the form in which it travels, for so many samples."""
        if self.for_each:
            return tensor.expand(batch, *tensor.shape[1:])
        return tensor.movedim(self.batch_dimension, 0) if self.batch_dimension else tensor

    def as_used(self, tensor: Tensor) -> Tensor:
        """What travelled, in the form in which the model's code takes it."""
        return tensor.movedim(0, self.batch_dimension).contiguous() if self.batch_dimension else tensor

    @property
    def nbytes(self) -> int:
        """Its bytes in the example."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient can come back for it."""
        return dtype_of(self.dtype).is_floating_point


@dataclass(frozen=True)
class CutPlan:
    """Everything about one cut."""

    cut: str
    tensors: tuple[BoundaryTensor, ...]
    calls: tuple[CallPlan, ...]
    """The calls that are stubs behind the cut; the cut is the last one."""
    repeated: tuple[str, ...]
    """Modules that run on both sides, because they need neither parameters nor the raw input."""


@dataclass(frozen=True)
class SplitPlan:
    """A split of a model into two parts, client and server, or three: client, server and head."""

    cuts: tuple[CutPlan, ...]
    inputs: tuple[LeafPlan, ...]
    input_names: tuple[str, ...]
    input_structure: str
    parts: Mapping[str, tuple[str, ...]]
    """The parameters and buffers that each part holds. What is frozen may be held by several."""
    untied: tuple[str, ...] = ()
    """Parameters that share memory with an earlier part's in the model, and no longer do in the split."""
    dense: bool = False
    """Whether placeholders need memory of their own, because the model writes into them."""

    def to_dict(self) -> dict[str, Any]:
        """Only dicts, lists, strings, numbers and None."""
        return _plain(asdict(self))

    @property
    def tensors_tell_shapes(self) -> bool:
        """Whether the boundary tensors alone will do, without the shapes that a Boundary carries."""
        leaves = [*self.inputs, *(leaf for cut in self.cuts for call in cut.calls for leaf in call.leaves)]
        return all(dimension.known for leaf in leaves for dimension in leaf.shape)

    def with_example_sizes(self) -> SplitPlan:
        """The plan with the example's sizes wherever the boundary tensors do not tell them."""

        def known(leaf: LeafPlan) -> LeafPlan:
            return replace(leaf, shape=tuple(replace(dimension, known=True) for dimension in leaf.shape))

        cuts = (
            replace(cut, calls=tuple(replace(call, leaves=tuple(map(known, call.leaves))) for call in cut.calls))
            for cut in self.cuts
        )
        return replace(self, cuts=tuple(cuts), inputs=tuple(map(known, self.inputs)))

    @classmethod
    def from_dict(cls, plan: Mapping[str, Any]) -> SplitPlan:
        """A plan from plain values, as `to_dict` gives them."""
        return cls(
            cuts=tuple(_cut_plan(cut) for cut in plan["cuts"]),
            inputs=tuple(_leaf_plan(leaf) for leaf in plan["inputs"]),
            input_names=tuple(plan["input_names"]),
            input_structure=plan["input_structure"],
            parts={part: tuple(names) for part, names in plan["parts"].items()},
            untied=tuple(plan["untied"]),
            dense=plan["dense"],
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _cut_plan(cut: Mapping[str, Any]) -> CutPlan:
    tensors = (BoundaryTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in cut["tensors"])
    calls = (CallPlan(**{**call, "leaves": tuple(map(_leaf_plan, call["leaves"]))}) for call in cut["calls"])
    return CutPlan(cut["cut"], tuple(tensors), tuple(calls), tuple(cut["repeated"]))


def _leaf_plan(leaf: Mapping[str, Any]) -> LeafPlan:
    return LeafPlan(leaf["dtype"], tuple(Dimension(**dimension) for dimension in leaf["shape"]), leaf["value"])


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type, such as float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The type of a name, such as float32."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SplitError(f"the plan names a type '{name}' that torch does not have")
    return dtype

"""What crosses a cut, and the gates through which a part's forward pass is entered and left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fsl_sage.split.trace.skeleton import Original
from fsl_sage.split.trace.structures import load_structure

PlainLeaf = tuple[int, ...] | bool | int | float | str | None
"""What travels of a leaf that is not sent: the shape of a tensor, or a plain value."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of what does not travel: of the inputs, and of what every module before the cut returned."""

    inputs: tuple[PlainLeaf, ...]
    calls: tuple[tuple[PlainLeaf, ...], ...]


@dataclass(frozen=True)
class Boundary:
    """What crosses a cut: the tensors, in the plan's order, and the shapes of the rest.

    Without `shapes` they follow from the tensors' own, by the plan.
    """

    tensors: tuple[Tensor, ...]
    shapes: Shapes | None = None

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Boundary:
        """The same boundary with other tensors: decoded, or cut off from the graph."""
        return Boundary(tensors, self.shapes)

    def detached(self) -> Boundary:
        """The same values as leaves of a new graph; what can carry a gradient asks for one."""
        return self.with_tensors(detached_leaves(self.tensors))


def detached_leaves(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors, detached from the graph that made them. Those of floating point can get gradients."""
    return tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)


def with_gradients(z: Iterable[Tensor], gradients: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a boundary that pass a gradient on, and theirs.

    There is a gradient for each tensor of floating point. One that a frozen layer made passes none on, and stands
    anywhere among the others.
    """
    floating = (tensor for tensor in z if tensor.is_floating_point())
    pairs = [pair for pair in zip(floating, gradients, strict=True) if pair[0].requires_grad]
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]


def as_boundary(args: tuple[Any, ...]) -> Boundary:
    """What a part was called with: a boundary, or the tensors that cross, together or one by one."""
    first = args[0] if args else None
    if isinstance(first, Boundary):
        return first
    if isinstance(first, tuple | list):
        return Boundary(tuple(first))
    return Boundary(args)


class CutReached(BaseException):
    """Ends a forward pass at the cut. Not an Exception, so that no model code takes it for an error."""


class ForwardPass:
    """One forward pass of a part."""

    def __init__(self, inputs: list[Any]) -> None:
        self.inputs = inputs
        self.before_entry = False
        self.stand_in_leaves: dict[tuple[str, int], list[Any]] = {}
        self.in_repeated = False
        self.in_noted = False
        self.entered: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.shapes: dict[tuple[str, int], tuple[PlainLeaf, ...]] = {}
        self.captured: dict[tuple[str, int, int], Tensor] = {}


class Live:
    """The forward pass that a part is in, if any. Every copy of a part has its own."""

    def __init__(self) -> None:
        self.current: ForwardPass | None = None


class Gate:
    """Replaces `forward` of one module of a part: a stub before the entry; up to the exit it notes results."""

    def __init__(self, module: nn.Module, name: str, live: Live) -> None:
        self.original = Original(module)
        self.name = name
        self.live = live
        self.stubs: dict[int, str] = {}
        """The calls that are stubs, with the structure of what they return."""
        self.is_repeated = False
        self.is_entry = False
        self.noted: dict[int, dict[int, bool]] = {}
        """The calls whose results are noted, and the leaves to send: True for those copied at once."""
        self.is_exit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = self.live.current
        if current is None:  # recomputed in the backward pass, by activation checkpointing for instance
            return self.original(*args, **kwargs)
        if not self.noted or current.in_noted:
            return self._enter(current, args, kwargs)
        current.in_noted = True
        try:
            output = self._enter(current, args, kwargs)
        finally:
            current.in_noted = False
        nth = current.left.get(self.name, 0)
        current.left[self.name] = nth + 1
        if nth in self.noted:
            self._note(current, nth, output)
        if self.is_exit:
            raise CutReached
        return output

    def _enter(self, current: ForwardPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not current.before_entry or current.in_repeated:
            return self.original(*args, **kwargs)
        if self.is_repeated:
            current.in_repeated = True
            try:
                return self.original(*args, **kwargs)
            finally:
                current.in_repeated = False
        nth = current.entered.get(self.name, 0)
        if nth not in self.stubs:
            return self.original(*args, **kwargs)
        current.entered[self.name] = nth + 1
        if self.is_entry:
            current.before_entry = False
        return pytree.tree_unflatten(current.stand_in_leaves[self.name, nth], structure_of(self.stubs[nth]))

    def _note(self, current: ForwardPass, nth: int, output: Any) -> None:
        leaves = pytree.tree_leaves(output)
        current.shapes[self.name, nth] = tuple(map(plain_leaf, leaves))
        for leaf, copied in self.noted[nth].items():
            current.captured[self.name, nth, leaf] = leaves[leaf].clone() if copied else leaves[leaf]


def is_inside_encoder_layer(model: nn.Module, name: str) -> bool:
    """Whether a module of the model is part of a TransformerEncoderLayer of torch."""
    parts = name.split(".")
    outer = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
    return any(isinstance(module, nn.TransformerEncoderLayer) for module in outer)


def no_fast_path(module: nn.Module, args: Any) -> None:
    """Does nothing, but where there is a hook, torch's encoder layer calls its submodules in evaluation too."""


@lru_cache(maxsize=4096)
def structure_of(text: str) -> pytree.TreeSpec:
    """The structure that a plan has written down."""
    return load_structure(text)


def plain_leaf(leaf: Any) -> PlainLeaf:
    """The shape of a tensor; a plain value as it is; None for all else."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else None

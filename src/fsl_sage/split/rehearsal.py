"""Run a copy of a part, to see what its modules do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fsl_sage.split.plan import CutPlan, dtype_of
from fsl_sage.split.sides import Boundary, Part
from fsl_sage.split.skeleton import Original, own_buffers, skeleton, without_data

T = TypeVar("T")


def rehearse(
    module: nn.Module, entry: CutPlan, example: Boundary | None, run: Callable[[nn.Module, tuple[Tensor, ...]], T]
) -> T:
    """`run` on a copy of a module behind the cut `entry`, which shares its parameters, and on the example's tensors.

    Without an example, for a model on the meta device, both have shapes but no data.
    """
    if example is not None:
        with torch.random.fork_rng(devices=[]):
            return run(skeleton(module, own_buffers), tuple(tensor.detach() for tensor in example.tensors))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    copied, tensors = skeleton(module, lambda tensor: without_data(fake, tensor)), _empty_tensors(fake, entry)
    with fake:
        return run(copied, tensors)


def _empty_tensors(fake: FakeTensorMode, entry: CutPlan) -> tuple[Tensor, ...]:
    with fake:
        return tuple(torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype)) for tensor in entry.tensors)


@dataclass
class SeenCall:
    """One module call behind the cut."""

    name: str
    module: nn.Module
    took: tuple[int, ...]
    """The shape of the first tensor among its arguments; () if there is none."""
    returned: tuple[int, ...] = ()
    structure: str = ""
    leaves: tuple[Any, ...] = ()
    """The plain values among the leaves of what it returned; None for the tensors."""
    main_leaf: int = 0
    """The position of the first tensor among these leaves."""
    inner: list[SeenCall] = field(default_factory=list)

    @property
    def has_parameters(self) -> bool:
        return any(True for _ in self.module.parameters())

    @property
    def is_composite(self) -> bool:
        """Whether modules inside of it hold parameters."""
        return any(True for child in self.module.children() for _ in child.parameters())

    @property
    def container(self) -> str | None:
        """The list or sequence of modules that it is an element of."""
        outer, _, own = self.name.rpartition(".")
        return outer if own.isdigit() else None

    @property
    def keeps_rank(self) -> bool:
        """Whether it takes a map or a sequence of features and returns one."""
        return len(self.took) == len(self.returned) >= 3


class _See:
    """Stands as `forward` of a module and notes its calls."""

    def __init__(self, module: nn.Module, name: str, seen: list[list[SeenCall]]) -> None:
        self.original = Original(module)
        self.name = name
        self.seen = seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = SeenCall(self.name, self.original.module, _shape_of_first((args, kwargs)))
        self.seen[-1].append(call)
        self.seen.append(call.inner)
        try:
            output = self.original(*args, **kwargs)
        finally:
            self.seen.pop()
        leaves, structure = pytree.tree_flatten(output)
        call.returned = _shape_of_first(output)
        call.structure = pytree.treespec_dumps(structure)
        call.leaves = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        call.main_leaf = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), 0)
        return output


def _shape_of_first(tree: Any) -> tuple[int, ...]:
    return next((tuple(leaf.shape) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)), ())


def calls_behind_the_cut(part: Part, entry: CutPlan, example: Boundary | None) -> list[SeenCall]:
    """The calls that the code behind the cut makes, each with the calls inside of it."""

    def run(copied: nn.Module, tensors: tuple[Tensor, ...]) -> list[SeenCall]:
        seen: list[list[SeenCall]] = [[]]
        for name, module in copied.named_modules():
            if name:
                module.__dict__["forward"] = _See(module, name, seen)
        with torch.no_grad():
            copied.eval()(tensors)
        return _after(seen[0], entry.cut)

    found = rehearse(part, entry, example, run)
    _replace_modules(found, part)
    return found


def _after(calls: list[SeenCall], cut: str) -> list[SeenCall]:
    """The calls after the cut: those after the one that contains it, and, inside of that one, the same again.

    What only completes an element of a sequence that the cut goes through, a residual block, does not count.
    """
    for position, call in enumerate(calls):
        if call.name == cut:
            return calls[position + 1 :]
        if _contains(call, cut):
            inside = _after(call.inner, cut)
            completes = call.container is not None and not any(later.container for later in inside)
            return ([] if completes else inside) + calls[position + 1 :]
    return calls


def _contains(call: SeenCall, name: str) -> bool:
    return any(inner.name == name or _contains(inner, name) for inner in call.inner)


def _replace_modules(calls: list[SeenCall], part: Part) -> None:
    """Let the calls point at the part's own modules instead of the copy's."""
    for call in calls:
        call.module = part.get_submodule(call.name)
        _replace_modules(call.inner, part)

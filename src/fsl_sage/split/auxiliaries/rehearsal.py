"""Run a copy of a model or of a part, to see what its modules do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fsl_sage.split.parts.gates import Boundary
from fsl_sage.split.plan.analysis import Analysis, MakeTensor
from fsl_sage.split.plan.split_plan import CutPlan, dtype_of
from fsl_sage.split.trace.skeleton import Original, on_meta, own_buffers, skeleton, tensor_leaves, without_data
from fsl_sage.split.trace.structures import dump_structure

T = TypeVar("T")


class Stage(Protocol):
    """Runs copies of a module, so that the module itself stays as it is."""

    @property
    def module(self) -> nn.Module:
        """The module."""

    def run_copy(self, prepare: Callable[[nn.Module], T]) -> T:
        """Run a copy of the module once, in evaluation, after `prepare`; returns what that has made."""


@dataclass(frozen=True)
class BehindTheCut:
    """A part behind the cut `entry`; without an example, for a model on the meta device, it runs on shapes alone."""

    module: nn.Module
    entry: CutPlan
    example: Boundary | None

    def run_copy(self, prepare: Callable[[nn.Module], T]) -> T:
        """Run a copy of the part on the tensors that cross the cut; see `Stage`."""

        def run(copied: nn.Module, tensors: tuple[Tensor, ...]) -> T:
            made = prepare(copied)
            with torch.no_grad():
                copied.eval()(tensors)
            return made

        if self.example is None:
            try:  # the meta device is the fastest, but not all code runs there
                with torch.random.fork_rng(devices=[]):
                    return run(skeleton(self.module, on_meta), _empty_tensors(self.entry, "meta"))
            except Exception:
                pass
        return rehearse(self.module, self.entry, self.example, run)


@dataclass(frozen=True)
class WholeModel:
    """A whole model. Behind any cut it does what the server's part does, so that one rehearsal serves many cuts."""

    analysis: Analysis

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.analysis.model

    def run_copy(self, prepare: Callable[[nn.Module], T]) -> T:
        """Run a copy of the model on its example; see `Stage`."""

        def run(tensor: MakeTensor, context: AbstractContextManager[Any]) -> T:
            copied = skeleton(self.module, tensor)
            inputs = self.analysis.inputs
            leaves = [tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in inputs.leaves]
            args, kwargs = inputs.arguments(leaves)
            with torch.random.fork_rng(devices=[]), context, torch.no_grad():
                made = prepare(copied)
                copied.eval()(*args, **kwargs)
            return made

        return self.analysis.cheaply(run)


def rehearse(
    module: nn.Module, entry: CutPlan, example: Boundary | None, run: Callable[[nn.Module, tuple[Tensor, ...]], T]
) -> T:
    """`run` on a copy of a module behind the cut `entry`, which shares its parameters, and on the example's tensors."""
    if example is not None:
        with torch.random.fork_rng(devices=[]):
            return run(skeleton(module, own_buffers), tuple(tensor.detach() for tensor in example.tensors))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    copied = skeleton(module, lambda tensor: without_data(fake, tensor))
    with fake:
        return run(copied, _empty_tensors(entry, "cpu"))


def _empty_tensors(entry: CutPlan, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype), device=device) for tensor in entry.tensors)


@dataclass
class SeenCall:
    """One module call."""

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
    main_argument: int = 0
    """The position, among the tensors that it took, of the one that it works on."""
    inner: list[SeenCall] = field(default_factory=list)

    @property
    def has_parameters(self) -> bool:
        """Whether the module holds any parameters."""
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

    def __init__(self, module: nn.Module, name: str, seen: list[list[SeenCall]], made: list[Tensor]) -> None:
        self.original = Original(module)
        self.name = name
        self.seen = seen
        self.made = made
        """What all modules have returned, in the order of time."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taken = tensor_leaves((args, kwargs))
        call = SeenCall(self.name, self.original.module, _shape_of_first(taken))
        call.main_argument = _newest(taken, self.made)
        self.seen[-1].append(call)
        self.seen.append(call.inner)
        try:
            output = self.original(*args, **kwargs)
        finally:
            self.seen.pop()
        leaves, structure = pytree.tree_flatten(output)
        call.returned = _shape_of_first(output)
        call.structure = dump_structure(structure)
        call.leaves = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        call.main_leaf = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), 0)
        self.made.extend(tensor_leaves(output))
        return output


def _newest(taken: list[Tensor], made: list[Tensor]) -> int:
    """Which of the tensors that a module takes it works on: the first, unless one of its shape was made later.

    So the decoder of an encoder-decoder works on what the encoder has made, and not on its own embeddings.
    """
    order = {id(tensor): position for position, tensor in enumerate(made)}
    ages = [order.get(id(tensor), -1) if tensor.shape == taken[0].shape else -1 for tensor in taken]
    return ages.index(max(ages)) if ages and ages[0] >= 0 else 0


def _shape_of_first(tree: Any) -> tuple[int, ...]:
    return next((tuple(leaf.shape) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)), ())


def seen_calls(stage: Stage) -> list[SeenCall]:
    """The calls that the code makes, each with the calls inside of it."""

    def prepare(copied: nn.Module) -> list[list[SeenCall]]:
        seen: list[list[SeenCall]] = [[]]
        made: list[Tensor] = []
        for name, module in copied.named_modules():
            if name:
                module.__dict__["forward"] = _See(module, name, seen, made)
        return seen

    (found,) = stage.run_copy(prepare)
    _replace_modules(found, stage.module)
    return found


def calls_after(calls: list[SeenCall], cut: str) -> list[SeenCall]:
    """The calls after the cut: those after the one that contains it, and, inside of that one, the same again.

    What only completes an element of a sequence that the cut goes through, a residual block, does not count.
    """
    for position, call in enumerate(calls):
        if call.name == cut:
            return calls[position + 1 :]
        if _contains(call, cut):
            inside = calls_after(call.inner, cut)
            completes = call.container is not None and not any(later.container for later in inside)
            return ([] if completes else inside) + calls[position + 1 :]
    return calls


def _contains(call: SeenCall, name: str) -> bool:
    return any(inner.name == name or _contains(inner, name) for inner in call.inner)


def _replace_modules(calls: list[SeenCall], module: nn.Module) -> None:
    """Let the calls point at the module's own modules instead of the copy's."""
    for call in calls:
        call.module = module.get_submodule(call.name)
        _replace_modules(call.inner, module)

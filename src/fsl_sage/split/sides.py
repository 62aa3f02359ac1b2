"""The parts of a split model: the model's own forward code, entered and left at the cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fsl_sage.split.plan import CutPlan, LeafPlan, SplitError, SplitPlan, dtype_of
from fsl_sage.split.skeleton import (
    Original,
    call_arguments,
    holder_and_attribute,
    named_tensors,
    placeholder,
    set_tensor,
    skeleton,
)

PlainLeaf = tuple[int, ...] | bool | int | float | str | None
"""What travels of a leaf that is not sent: the shape of a tensor, or a plain value."""


@dataclass(frozen=True)
class Side:
    """The shapes of what does not travel: of the inputs, and of what every module before the cut returned."""

    inputs: tuple[PlainLeaf, ...]
    calls: tuple[tuple[PlainLeaf, ...], ...]


@dataclass(frozen=True)
class Boundary:
    """What crosses a cut: the tensors, in the plan's order, and the shapes of the rest.

    Without `side` the shapes follow from the tensors' own, by the plan.
    """

    tensors: tuple[Tensor, ...]
    side: Side | None = None

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Boundary:
        """The same boundary with other tensors: decoded, or cut off from the graph."""
        return Boundary(tensors, self.side)

    def detached(self) -> Boundary:
        """The same values as leaves of a new graph; what can carry a gradient asks for one."""
        return self.with_tensors(
            tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in self.tensors)
        )


class _CutReached(BaseException):
    """Ends a forward pass at the cut. Not an Exception, so that no model code takes it for an error."""


class _Run:
    """One forward pass of a part."""

    def __init__(self, inputs: list[Any]) -> None:
        self.inputs = inputs
        self.before_entry = False
        self.stand_in_leaves: dict[tuple[str, int], list[Any]] = {}
        self.in_repeated = False
        self.in_recorded = False
        self.entered: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.shapes: dict[tuple[str, int], tuple[PlainLeaf, ...]] = {}
        self.captured: dict[tuple[str, int, int], Tensor] = {}


class _Live:
    """The forward pass that a part is in, if any. Every copy of a part has its own."""

    def __init__(self) -> None:
        self.run: _Run | None = None


class _Gate:
    """Stands as `forward` of one module of a part: a stub before the entry, a recorder before the exit."""

    def __init__(self, module: nn.Module, name: str, live: _Live) -> None:
        self.original = Original(module)
        self.name = name
        self.live = live
        self.stubs: dict[int, str] = {}
        """The calls that are stubs, with the structure of what they return."""
        self.is_repeated = False
        self.is_entry = False
        self.records: dict[int, dict[int, bool]] = {}
        """The calls whose results are noted, and the leaves to send: True for those copied at once."""
        self.is_exit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.live.run
        if run is None:  # recomputed in the backward pass, by activation checkpointing for instance
            return self.original(*args, **kwargs)
        if not self.records or run.in_recorded:
            return self._enter(run, args, kwargs)
        run.in_recorded = True
        try:
            output = self._enter(run, args, kwargs)
        finally:
            run.in_recorded = False
        nth = run.left.get(self.name, 0)
        run.left[self.name] = nth + 1
        if nth in self.records:
            self._record(run, nth, output)
        if self.is_exit:
            raise _CutReached
        return output

    def _enter(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not run.before_entry or run.in_repeated:
            return self.original(*args, **kwargs)
        if self.is_repeated:
            run.in_repeated = True
            try:
                return self.original(*args, **kwargs)
            finally:
                run.in_repeated = False
        nth = run.entered.get(self.name, 0)
        if nth not in self.stubs:
            return self.original(*args, **kwargs)
        run.entered[self.name] = nth + 1
        if self.is_entry:
            run.before_entry = False
        return pytree.tree_unflatten(run.stand_in_leaves[self.name, nth], structure_of(self.stubs[nth]))

    def _record(self, run: _Run, nth: int, output: Any) -> None:
        leaves = pytree.tree_leaves(output)
        run.shapes[self.name, nth] = tuple(map(_plain_leaf, leaves))
        for leaf, copied in self.records[nth].items():
            run.captured[self.name, nth, leaf] = leaves[leaf].clone() if copied else leaves[leaf]


def _is_inside_encoder_layer(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    outer = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
    return any(isinstance(module, nn.TransformerEncoderLayer) for module in outer)


def _no_fast_path(module: nn.Module, args: Any) -> None:
    """Does nothing, but where there is a hook, torch's encoder layer calls its submodules in evaluation too."""


@lru_cache(maxsize=4096)
def structure_of(text: str) -> pytree.TreeSpec:
    """The structure that a plan has written down."""
    return pytree.treespec_loads(text)


def _plain_leaf(leaf: Any) -> PlainLeaf:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else None


class Part(nn.Module):
    """One part of a split model: `client`, `server` or `head`.

    Its parameters and buffers are those that the plan gives it, under the model's own names. The first part is called
    as the model is and returns a `Boundary`; later parts take a `Boundary` (or its tensors); the last one returns what
    the model returns. Deep copies are independent; one copy must not run in two threads at once.
    """

    def __init__(self, model: nn.Module, plan: SplitPlan, name: str) -> None:
        super().__init__()
        index = list(plan.parts).index(name)
        self.plan = plan
        self.name = name
        self.entry = plan.cuts[index - 1] if index > 0 else None
        self.exit = plan.cuts[index] if index < len(plan.cuts) else None
        self._live = _Live()
        self._absent: list[str] = []
        self._adopt(model)
        self.drop(set(named_tensors(model)).difference(plan.parts[name]))
        self._place_gates()

    def _adopt(self, model: nn.Module) -> None:
        """Hold the model's tensors and modules without a prefix, by sharing its registries."""
        self.__dict__["_model"] = model
        for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[registry] = model.__dict__[registry]
        self.training = model.training

    def _place_gates(self) -> None:
        model: nn.Module = self.__dict__["_model"]
        gates: dict[str, _Gate] = {}

        def gate(name: str) -> _Gate:
            if name not in gates:
                gates[name] = _Gate(model.get_submodule(name), name, self._live)
            return gates[name]

        if self.entry:
            for call in self.entry.calls:
                gate(call.module).stubs[call.nth] = call.structure
            for name in self.entry.repeated:
                gate(name).is_repeated = True
            gate(self.entry.cut).is_entry = True
        if self.exit:
            for call in self.exit.calls:
                gate(call.module).records[call.nth] = {}
            for tensor in self.exit.tensors:
                if tensor.module is not None:
                    gate(tensor.module).records[tensor.nth][tensor.leaf] = tensor.sent_as_returned
            gate(self.exit.cut).is_exit = True
        for name, placed in gates.items():
            module = model.get_submodule(name)
            module.__dict__["forward"] = placed
            if _is_inside_encoder_layer(model, name):
                module.register_forward_pre_hook(_no_fast_path)

    def drop(self, names: Iterable[str]) -> None:
        """Replace parameters and buffers by placeholders that are neither, and that take no memory."""
        model: nn.Module = self.__dict__["_model"]
        for name in names:
            module, attribute = holder_and_attribute(model, name)
            registry: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
            tensor: Tensor = registry.pop(attribute)
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            setattr(module, attribute, placeholder(tensor.shape, tensor.dtype, device))
            self._absent.append(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._start(args, kwargs) if self.entry is None else self._receive(as_boundary(args), self.entry)
        model_args, model_kwargs = pytree.tree_unflatten(run.inputs, structure_of(self.plan.input_structure))
        self._live.run = run
        try:
            output = self.__dict__["_model"](*model_args, **model_kwargs)
        except _CutReached:
            return self._boundary(run)
        finally:
            self._live.run = None
        if self.exit is not None:
            raise SplitError(f"the forward pass ended without a call of the cut '{self.exit.cut}'")
        return output

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
        if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            args, kwargs = call_arguments(args[0])
        leaves, structure = pytree.tree_flatten((args, kwargs))
        planned = structure_of(self.plan.input_structure)
        if structure != planned:
            # Keyword inputs may come in another order.
            kwargs = {name: kwargs[name] for name in self.plan.input_names if name in kwargs} | kwargs
            leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != planned:
            given = ", ".join([*(f"input {i}" for i in range(len(args))), *kwargs])
            wanted = ", ".join(self.plan.input_names)
            raise SplitError(
                f"the model was split for the inputs {wanted} and is called with {given}; split it for these"
            )
        return _Run(leaves)

    def _receive(self, boundary: Boundary, entry: CutPlan) -> _Run:
        """Set up a pass from the boundary: placeholders for all that did not travel."""
        tensors = boundary.tensors
        if len(tensors) != len(entry.tensors):
            names = ", ".join(tensor.name for tensor in entry.tensors)
            raise SplitError(
                f"{len(entry.tensors)} tensors cross at '{entry.cut}' ({names}); {len(tensors)} were given"
            )
        stand_in = _Placeholders(tensors, entry, self.plan.dense)
        side = boundary.side
        run = _Run(stand_in.leaves(self.plan.inputs, side.inputs if side else None))
        run.before_entry = True
        for position, call in enumerate(entry.calls):
            leaves = stand_in.leaves(call.leaves, side.calls[position] if side else None)
            run.stand_in_leaves[call.module, call.nth] = leaves
        for tensor, plan in zip(tensors, entry.tensors, strict=True):
            leaves = run.inputs if plan.module is None else run.stand_in_leaves[plan.module, plan.nth]
            leaves[plan.leaf] = tensor.clone() if plan.copied else tensor
        return run

    def _boundary(self, run: _Run) -> Boundary:
        assert self.exit is not None
        try:
            tensors = tuple(
                run.inputs[plan.leaf] if plan.module is None else run.captured[plan.module, plan.nth, plan.leaf]
                for plan in self.exit.tensors
            )
        except KeyError as missing:
            raise SplitError(f"the forward pass did not call '{missing.args[0][0]}', whose output must cross") from None
        shapes = tuple(run.shapes.get((call.module, call.nth), ()) for call in self.exit.calls)
        return Boundary(tensors, Side(tuple(map(_plain_leaf, run.inputs)), shapes))

    def train(self, mode: bool = True) -> Part:
        self.__dict__["_model"].training = mode
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Part:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        model: nn.Module = self.__dict__["_model"]
        for name in self._absent:
            module, attribute = holder_and_attribute(model, name)
            absent: Tensor = getattr(module, attribute)
            one = fn(absent.flatten()[:1].clone()).reshape((1,) * absent.dim())
            setattr(module, attribute, one.expand(absent.shape))
        return self

    def extra_repr(self) -> str:
        cuts = [cut.cut for cut in (self.entry, self.exit) if cut]
        return f"part='{self.name}', cut at {' and '.join(cuts)}"


class _Placeholders:
    """Makes what stands for the values that did not travel."""

    def __init__(self, tensors: tuple[Tensor, ...], entry: CutPlan, dense: bool) -> None:
        self.tensors = tensors
        self.entry = entry
        self.dense = dense

    def leaves(self, plans: tuple[LeafPlan, ...], given: tuple[PlainLeaf, ...] | None) -> list[Any]:
        if given is None or len(given) != len(plans):
            return [self._leaf(plan, self._shape(plan) if plan.dtype else plan.value) for plan in plans]
        return [self._leaf(plan, leaf) for plan, leaf in zip(plans, given, strict=True)]

    def _leaf(self, plan: LeafPlan, leaf: Any) -> Any:
        if not isinstance(leaf, tuple):
            return leaf
        return placeholder(leaf, self._dtype(plan), self.tensors[0].device, self.dense)

    def _shape(self, plan: LeafPlan) -> tuple[int, ...]:
        if not all(dimension.known for dimension in plan.shape):
            raise SplitError(
                f"at '{self.entry.cut}' the tensors alone do not tell all shapes; pass on the whole Boundary"
            )
        return tuple(dimension.of(self.tensors) for dimension in plan.shape)

    def _dtype(self, plan: LeafPlan) -> torch.dtype:
        """The planned type, or what the cut's type has become, if the model was converted since."""
        if plan.dtype is None or plan.dtype == self.entry.tensors[0].dtype:
            return self.tensors[0].dtype
        return dtype_of(plan.dtype)


def as_boundary(args: tuple[Any, ...]) -> Boundary:
    first = args[0] if args else None
    if isinstance(first, Boundary):
        return first
    if isinstance(first, tuple | list):
        return Boundary(tuple(first))
    return Boundary(args)


class Split:
    """A model in two parts, or three: `client`, `server` and, for a U-shape, `head`.

    `server(client(batch))`, or `head(server(client(batch)))`, is what the model computes. The parts share the given
    model's parameters and buffers.
    """

    def __init__(self, model: nn.Module, plan: SplitPlan) -> None:
        self.plan = plan
        self.example: Boundary | None = None
        """The example's boundary at the first cut, where the split was checked on real data."""
        self._model = model
        self._parts = {name: _part(model, plan, name) for name in plan.parts}

    @property
    def client(self) -> Part:
        """Called as the model is; returns a Boundary."""
        return self._parts["client"]

    @property
    def server(self) -> Part:
        """Takes a Boundary; returns what the model returns, or a Boundary if there is a head."""
        return self._parts["server"]

    @property
    def head(self) -> Part:
        """Takes the server's Boundary; returns what the model returns."""
        if "head" not in self._parts:
            raise SplitError("a split at one cut has no head; give two cuts, such as cut=('layer1', 'layer3')")
        return self._parts["head"]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, from the input to the output."""
        return tuple(self._parts.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes, part after part."""
        output = self.client(*args, **kwargs)
        for part in self.parts[1:]:
            output = part(output)
        return output

    def merged(self) -> nn.Module:
        """The ordinary model with the parts' present weights, which it shares: deep-copy it to keep them."""
        model = skeleton(self._model)
        for part in self.parts:
            for name, tensor in named_tensors(part).items():
                set_tensor(model, name, tensor)
        return model


def _part(model: nn.Module, plan: SplitPlan, name: str) -> Part:
    part = Part(skeleton(model), plan, name)
    for untied in plan.untied:
        if untied in plan.parts[name]:
            tensor = named_tensors(part)[untied]
            set_tensor(part, untied, nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
    return part

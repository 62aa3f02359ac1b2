"""The parts of a split model: the model's own forward code, entered and left at the cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fsl_sage.split.errors import SplitError
from fsl_sage.split.parts.gates import (
    Boundary,
    CutReached,
    ForwardPass,
    Gate,
    Live,
    PlainLeaf,
    Shapes,
    as_boundary,
    is_inside_encoder_layer,
    no_fast_path,
    plain_leaf,
    structure_of,
)
from fsl_sage.split.plan.split_plan import BoundaryTensor, CutPlan, LeafPlan, SplitPlan, dtype_of
from fsl_sage.split.trace.skeleton import (
    call_arguments,
    holder_and_attribute,
    named_tensors,
    placeholder,
    set_tensor,
    skeleton,
)

_REGISTRIES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
_PASSAGE = "fsl_sage.passage"
"""The one thing of its own that a part holds. torch allows no module or tensor with a dot in its name."""


class Part(nn.Module):
    """One part of a split model: `client`, `server` or `head`.

    Its parameters and buffers are those that the plan gives it, under the model's own names. The first part is called
    as the model is and returns a `Boundary`; later parts take a `Boundary` (or its tensors); the last one returns what
    the model returns. Deep copies are independent; one copy must not run in two threads at once.

    A part has no attributes but those of every `nn.Module`, so that none can take the place of a submodule. What it
    knows of itself is in its `Passage`.
    """

    def __init__(self, model: nn.Module, plan: SplitPlan, name: str) -> None:
        super().__init__()
        share_registries(self, model)
        self.__dict__[_PASSAGE] = Passage(model, plan, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """From the model's inputs or a `Boundary` to a `Boundary` or the model's output, as the class says."""
        return passage(self).run(args, kwargs)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode: the flag is the model's own, whose code reads it."""
        return passage(self).model.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the model's flag."""
        if _PASSAGE in self.__dict__:  # else the part is being made
            passage(self).model.training = mode

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Part:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        passage(self).apply_to_absent(fn)
        return self

    def extra_repr(self) -> str:
        """What `print` shows of the part."""
        return passage(self).describe()


def passage(part: Part) -> Passage:
    """What a part knows of itself."""
    found: Passage = part.__dict__[_PASSAGE]
    return found


def crossing_tensors(part: nn.Module) -> tuple[BoundaryTensor, ...]:
    """What a part sends across the cut behind it; nothing if it is the last one, or no part."""
    found = passage(part).exit if isinstance(part, Part) else None
    return found.tensors if found else ()


def share_registries(module: nn.Module, model: nn.Module) -> None:
    """Let a module hold a model's tensors and submodules without a prefix."""
    for registry in _REGISTRIES:
        module.__dict__[registry] = model.__dict__[registry]


class Passage:
    """The way through a model from the entry of a part to its exit."""

    def __init__(self, model: nn.Module, plan: SplitPlan, name: str) -> None:
        index = list(plan.parts).index(name)
        self.model = model
        self.plan = plan
        self.name = name
        self.entry = plan.cuts[index - 1] if index > 0 else None
        self.exit = plan.cuts[index] if index < len(plan.cuts) else None
        self._live = Live()
        self._absent: list[str] = []
        self.drop(set(named_tensors(model)).difference(plan.parts[name]))
        self._place_gates()

    def _place_gates(self) -> None:
        gates: dict[str, Gate] = {}

        def gate(name: str) -> Gate:
            if name not in gates:
                gates[name] = Gate(self.model.get_submodule(name), name, self._live)
            return gates[name]

        if self.entry:
            for call in self.entry.calls:
                gate(call.module).stubs[call.nth] = call.structure
            for name in self.entry.repeated:
                gate(name).is_repeated = True
            gate(self.entry.cut).is_entry = True
        if self.exit:
            for call in self.exit.calls:
                gate(call.module).noted[call.nth] = {}
            for tensor in self.exit.tensors:
                if tensor.module is not None:
                    gate(tensor.module).noted[tensor.nth][tensor.leaf] = tensor.sent_as_returned
            gate(self.exit.cut).is_exit = True
        for name, placed in gates.items():
            module = self.model.get_submodule(name)
            module.__dict__["forward"] = placed
            if is_inside_encoder_layer(self.model, name):
                module.register_forward_pre_hook(no_fast_path)

    def drop(self, names: Iterable[str]) -> None:
        """Replace parameters and buffers by placeholders that are neither, and that take no memory."""
        for name in names:
            module, attribute = holder_and_attribute(self.model, name)
            registry: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
            tensor: Tensor = registry.pop(attribute)
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            dense = self.plan.dense and not isinstance(tensor, nn.Parameter)  # only buffers are written in a pass
            setattr(module, attribute, placeholder(tensor.shape, tensor.dtype, device, dense))
            self._absent.append(name)

    @property
    def absent(self) -> frozenset[str]:
        """The model's parameters and buffers that this part does not hold."""
        return frozenset(self._absent)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The part's forward pass."""
        current = self._start(args, kwargs) if self.entry is None else self._receive(as_boundary(args), self.entry)
        model_args, model_kwargs = pytree.tree_unflatten(current.inputs, structure_of(self.plan.input_structure))
        self._live.current = current
        try:
            output = self.model(*model_args, **model_kwargs)
        except CutReached:
            return self._boundary(current)
        finally:
            self._live.current = None
        if self.exit is not None:
            raise SplitError(f"the forward pass ended without a call of the cut '{self.exit.cut}'")
        return output

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardPass:
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
        return ForwardPass(leaves)

    def _receive(self, boundary: Boundary, entry: CutPlan) -> ForwardPass:
        """Set up a pass from the boundary: placeholders for all that did not travel."""
        if len(boundary.tensors) != len(entry.tensors):
            names = ", ".join(tensor.name for tensor in entry.tensors)
            raise SplitError(
                f"{len(entry.tensors)} tensors cross at '{entry.cut}' ({names}); {len(boundary.tensors)} were given"
            )
        tensors = tuple(plan.as_used(x) for plan, x in zip(entry.tensors, boundary.tensors, strict=True))
        stand_in = _Placeholders(tensors, entry, self.plan.dense)
        given = boundary.shapes
        current = ForwardPass(stand_in.leaves(self.plan.inputs, given.inputs if given else None))
        current.before_entry = True
        for position, call in enumerate(entry.calls):
            leaves = stand_in.leaves(call.leaves, given.calls[position] if given else None)
            current.stand_in_leaves[call.module, call.nth] = leaves
        for tensor, plan in zip(tensors, entry.tensors, strict=True):
            leaves = current.inputs if plan.module is None else current.stand_in_leaves[plan.module, plan.nth]
            leaves[plan.leaf] = tensor.clone() if plan.copied else tensor
        return current

    def _boundary(self, current: ForwardPass) -> Boundary:
        assert self.exit is not None
        try:
            tensors = [
                current.inputs[plan.leaf] if plan.module is None else current.captured[plan.module, plan.nth, plan.leaf]
                for plan in self.exit.tensors
            ]
        except KeyError as missing:
            raise SplitError(f"the forward pass did not call '{missing.args[0][0]}', whose output must cross") from None
        shapes = tuple(current.shapes.get((call.module, call.nth), ()) for call in self.exit.calls)
        batch = tensors[0].shape[self.exit.tensors[0].batch_dimension] if tensors[0].dim() else 1
        sent = tuple(plan.as_sent(tensor, batch) for plan, tensor in zip(self.exit.tensors, tensors, strict=True))
        return Boundary(sent, Shapes(tuple(map(plain_leaf, current.inputs)), shapes))

    def apply_to_absent(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the placeholders as the tensors of the part were."""
        for name in self._absent:
            module, attribute = holder_and_attribute(self.model, name)
            absent: Tensor = getattr(module, attribute)
            if absent.is_contiguous():  # it has memory of its own, or is empty
                setattr(module, attribute, fn(absent))
                continue
            one = fn(absent.flatten()[:1].clone()).reshape((1,) * absent.dim())
            setattr(module, attribute, one.expand(absent.shape))

    def describe(self) -> str:
        """For people: which part it is."""
        cuts = [cut.cut for cut in (self.entry, self.exit) if cut]
        return f"part='{self.name}', cut at {' and '.join(cuts)}"


class _Placeholders:
    """Makes what stands for the values that did not travel."""

    def __init__(self, tensors: tuple[Tensor, ...], entry: CutPlan, dense: bool) -> None:
        self.tensors = tensors
        self.entry = entry
        self.dense = dense

    def leaves(self, plans: tuple[LeafPlan, ...], given: tuple[PlainLeaf, ...] | None) -> list[Any]:
        """A placeholder for each planned value. `given` has their shapes; without it they follow from the tensors."""
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

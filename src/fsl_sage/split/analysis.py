"""Where a model can be cut, and the plan of each cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fsl_sage.split.crossing import Crossing, Crossings, Key, LeafKey
from fsl_sage.split.plan import (
    BoundaryTensor,
    CallPlan,
    CutPlan,
    Dimension,
    LeafPlan,
    SplitError,
    SplitPlan,
    dtype_name,
)
from fsl_sage.split.skeleton import call_arguments, named_tensors, own_buffers, skeleton, without_data
from fsl_sage.split.trace import Leaf, Trace, record

Tied = Literal["refuse", "untie"]
PARTS = ("client", "server", "head")


@dataclass(frozen=True)
class Inputs:
    """An example's arguments as named leaves."""

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    structure: pytree.TreeSpec
    raw: frozenset[str]
    """The inputs that never cross."""

    @classmethod
    def of(cls, model: nn.Module, example: Any, private: Collection[str] = ()) -> Inputs:
        args, kwargs = call_arguments(example)
        parameters = list(inspect.signature(model.forward).parameters.values())
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        arguments = [
            *((named[i] if i < len(named) else f"input {i}", arg) for i, arg in enumerate(args)),
            *kwargs.items(),
        ]
        leaves, structure = pytree.tree_flatten((args, kwargs))
        names = [
            f"{name}{pytree.keystr(path)}"
            for name, value in arguments
            for path, _ in pytree.tree_leaves_with_path(value)
        ]
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise SplitError("the example holds no tensor; give a tensor, or a dict of keyword inputs")
        raw = {*_main_inputs(model, arguments, named), *private}
        unknown = raw.difference(name for name, _ in arguments)
        if unknown:
            raise SplitError(f"the private input '{unknown.pop()}' is not in the example; it holds {', '.join(names)}")
        raw_leaves = frozenset(leaf for leaf in names if leaf.split("[")[0].split(".")[0] in raw)
        return cls(tuple(leaves), tuple(names), structure, raw_leaves)

    def main(self) -> Tensor:
        """The first raw tensor: its first dimension is the batch."""
        return next(
            leaf
            for leaf, name in zip(self.leaves, self.names, strict=True)
            if name in self.raw and isinstance(leaf, Tensor)
        )

    def arguments(self, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def changed(self, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        return tuple(change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)

    def doubled(self) -> tuple[Any, ...]:
        """The same samples twice."""
        size = self.main().shape[0]
        return self.changed(lambda leaf: torch.cat([leaf, leaf]) if leaf.dim() and leaf.shape[0] == size else leaf)

    def shortened(self) -> tuple[Any, ...] | None:
        """Sequences without their last element; None where the main input is no sequence."""
        main = self.main()
        sequence = main.dim() == 3 or (main.dim() == 2 and not main.is_floating_point())
        if not sequence or main.shape[1] < 2:
            return None
        length = main.shape[1]

        def shorten(leaf: Tensor) -> Tensor:
            for dimension in range(1, leaf.dim()):
                if leaf.shape[dimension] == length:
                    leaf = leaf.narrow(dimension, 0, length - 1)
            return leaf

        return self.changed(shorten)


def _main_inputs(model: nn.Module, arguments: Sequence[tuple[str, Any]], signature: list[str]) -> set[str]:
    """The raw data among the arguments: what the model calls its main input, or its first one."""
    given = [name for name, value in arguments if isinstance(value, Tensor)]
    declared = getattr(model, "main_input_name", None)
    if declared in given:
        return {declared}
    if isinstance(declared, str) and (floating := [n for n, v in arguments if n in given and v.is_floating_point()]):
        return set(floating)
    in_order = [name for name in signature if name in given] or given
    return set(in_order[:1]) or {arguments[0][0]}


class Analysis:
    """The traces of a model: as it evaluates, as it trains on a larger batch, and on a shorter sequence."""

    def __init__(self, model: nn.Module, example: Any, private: Collection[str] = ()) -> None:
        self.inputs = Inputs.of(model, example, private)
        self.model = model
        self.tensors = named_tensors(model)
        self.parameters = {name for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}
        self.traces = self._take_traces()
        self.crossings = [Crossings(trace, set(self.inputs.raw), self.parameters) for trace in self.traces]
        self._named_modules = dict(model.named_modules())

    @property
    def on_meta(self) -> bool:
        """Whether the model is on the meta device."""
        return any(tensor.is_meta for tensor in self.tensors.values())

    @property
    def cuda_devices(self) -> list[int]:
        devices = {tensor.device for tensor in self.tensors.values()}
        return sorted(device.index or 0 for device in devices if device.type == "cuda")

    # -- traces --------------------------------------------------------------------------------------------------------

    def _take_traces(self) -> list[Trace]:
        """Besides the plain trace, those that tell which dimensions follow the batch and the sequence.

        A model that cannot run a variant (a fixed batch, one sample in BatchNorm) is planned from those that it can.
        """
        plain, doubled = self.inputs.leaves, self.inputs.doubled()
        traces = [self._trace(plain, training=False)]
        larger = self._try_trace(doubled, training=True)
        if larger is not None:
            traces.append(larger)
        else:
            traces += filter(None, [self._try_trace(doubled, training=False), self._try_trace(plain, training=True)])
        shortened = self.inputs.shortened()
        if shortened is not None:
            traces += filter(None, [self._try_trace(shortened, training=False)])
        return traces

    def _try_trace(self, leaves: tuple[Any, ...], training: bool) -> Trace | None:
        try:
            return self._trace(leaves, training)
        except Exception:
            return None

    def _trace(self, leaves: tuple[Any, ...], training: bool) -> Trace:
        """A trace on the model's own parameters, or, for a model on the meta device, on tensors without data."""
        if self.on_meta:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            return self._record(leaves, training, lambda tensor: without_data(fake, tensor), fake)
        with torch.random.fork_rng(devices=self.cuda_devices):
            return self._record(leaves, training, own_buffers, nullcontext())

    def _record(
        self,
        leaves: tuple[Any, ...],
        training: bool,
        tensor: Callable[[Tensor], Tensor],
        context: AbstractContextManager[Any],
    ) -> Trace:
        model = skeleton(self.model, tensor)
        if not training:
            model.eval()
        elif not model.training:  # else what the user has put into evaluation on purpose (frozen BatchNorm) stays so
            model.train()
        arguments = [tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = self.inputs.arguments(arguments)
        with context:
            return record(model, named_tensors(model), list(self.inputs.names), args, kwargs)

    # -- cuts ----------------------------------------------------------------------------------------------------------

    @cached_property
    def cut_names(self) -> list[str]:
        """The modules after which the model can be cut, in the order of the forward pass.

        Where a module ends together with the one around it, only the outer one is listed. Cuts whose gradients equal
        the model's to rounding but not bit for bit are left out; they are not refused.
        """
        first = self.traces[0]
        order = sorted(range(1, len(first.calls)), key=lambda position: (first.calls[position].exit, -position))
        names = [first.calls[position].name for position in order]
        candidates = [name for name in dict.fromkeys(names) if not self._ends_with_its_parent(name)]
        return [name for name in candidates if self._obstacle(name) is None and not self._regroups(name)]

    def _regroups(self, name: str) -> bool:
        """Whether gradients are summed in another order than the model does, so that they agree only to rounding.

        That happens where code between the calls makes a value that both sides then use, each in its own graph.
        """
        return any(crossing.used_on_both_sides for crossing in self._crossing_at[name])

    def _ends_with_its_parent(self, name: str) -> bool:
        trace, positions = self.traces[0], self.crossings[0].calls_of(name)
        if len(positions) != 1:
            return False
        call = trace.calls[positions[0]]
        parent = trace.calls[call.parent]
        if call.parent <= 0 or len(self.crossings[0].calls_of(parent.name)) != 1:
            return False
        own = [leaf.node for leaf in call.leaves]
        passed_on = [trace.nodes[leaf.node].reads for leaf in parent.leaves if leaf.is_tensor]
        return parent.exit - call.exit == len(own) and passed_on == [(node,) for node in own]

    def crossing(self, cut: str) -> list[Crossing]:
        """What crosses the cut, trace by trace; a SplitError says why the model cannot be cut there."""
        obstacle = self._obstacle(cut)
        if obstacle is not None:
            raise SplitError(f"the model cannot be cut at '{cut}': {obstacle}; {self._advice()}")
        return self._crossing_at[cut]

    @cached_property
    def _crossing_at(self) -> dict[str, list[Crossing]]:
        return {}

    def _obstacle(self, cut: str) -> str | None:
        """Why the model cannot be cut at a module, as the end of a sentence; None if it can."""
        if cut not in self._named_modules:
            return "no module has this name"
        counts = [len(crossings.calls_of(cut)) for crossings in self.crossings]
        if cut == "" or 0 in counts:
            return "it is the model itself" if cut == "" else "it is not called in the forward pass"
        if max(counts) > 1:
            return f"it is called {max(counts)} times in one forward pass (inside a repeated call)"
        if cut not in self._crossing_at:
            self._crossing_at[cut] = [crossings.at(crossings.calls_of(cut)[0]) for crossings in self.crossings]
        found = self._crossing_at[cut]
        for crossing in found:
            if crossing.obstacles:
                return crossing.obstacles[0]
        return self._pointless(cut, found)

    def _pointless(self, cut: str, found: list[Crossing]) -> str | None:
        sent = [leaf for leaf in set().union(*(crossing.sent for crossing in found)) if leaf.module == cut]
        call = self.traces[0].calls[self.crossings[0].calls_of(cut)[0]]
        if not any(self.crossings[0].from_raw(call.leaves[leaf.leaf].node) for leaf in sent):
            return "what it returns does not carry the input on to the output"
        held = [self.parameters & names for names in self._used_by([cut])]
        if not held[0]:
            return "no parameters come before it"
        if not held[1]:
            return "no parameters come after it"
        return None

    def _advice(self) -> str:
        names = self.cut_names
        if not names:
            return "the model cannot be cut anywhere"
        one_tensor = [n for n in names if len(set().union(*(c.sent for c in self._crossing_at[n]))) == 1] or names
        shown = one_tensor[:60]
        more = "" if len(shown) == len(names) else f" … (cut_points lists all {len(names)})"
        return f"cuts that work: {', '.join(shown)}{more}"

    # -- who holds what ------------------------------------------------------------------------------------------------

    @cached_property
    def _uses(self) -> list[dict[str, list[int]]]:
        """For each trace, the positions of the operations that read each parameter and buffer."""
        return [_uses_of(trace) for trace in self.traces]

    def _sides(self, cuts: Sequence[str]) -> list[set[str]]:
        """The parameters and buffers that each part uses, and those that nobody uses with the module they belong to."""
        sides = self._used_by(cuts)
        used = set().union(*sides)
        for name in self.tensors:
            if name not in used:
                sides[self._side_of_unused(name, cuts)].add(name)
        return sides

    def _used_by(self, cuts: Sequence[str]) -> list[set[str]]:
        """The parameters and buffers that each part uses."""
        sides: list[set[str]] = [set() for _ in range(len(cuts) + 1)]
        for crossings, uses in zip(self.crossings, self._uses, strict=True):
            times = [crossings.trace.calls[crossings.calls_of(cut)[0]].exit for cut in cuts]
            for name, positions in uses.items():
                for side, (start, end) in enumerate(
                    zip([-1, *times], [*times, len(crossings.trace.nodes)], strict=True)
                ):
                    if any(start <= position < end for position in positions):
                        sides[side].add(name)
        for side, cut in enumerate(cuts):
            for crossings, crossing in zip(self.crossings, self._crossing_at.get(cut, []), strict=False):
                for node in crossing.states_again:
                    sides[side + 1].update(crossings.trace.state_names[node])
        return sides

    def _side_of_unused(self, name: str, cuts: Sequence[str]) -> int:
        """With the innermost module around it that one part alone runs; with the server's part if there is none."""
        module = name
        while module:
            module = module.rpartition(".")[0]
            sides = {side for crossings in self.crossings for side in _sides_of_calls(crossings, module, cuts)}
            if len(sides) == 1:
                return sides.pop()
        return 1

    # -- plans ---------------------------------------------------------------------------------------------------------

    def plan(self, cuts: Sequence[str], tied: Tied = "refuse") -> SplitPlan:
        """The plan of a split at one cut, or at two for a U-shape."""
        crossings = [self.crossing(cut) for cut in cuts]
        if len(cuts) == 2:
            self._check_order(*cuts)
        sides = self._sides(cuts)
        untied = self._resolve_shared(sides, cuts, tied)
        planner = _CutPlanner(self)
        cut_plans = tuple(planner.plan(cut, crossing) for cut, crossing in zip(cuts, crossings, strict=True))
        leaves = [[trace.inputs[i] for trace in self.traces] for i in range(len(self.inputs.leaves))]
        return SplitPlan(
            cuts=cut_plans,
            inputs=tuple(planner.leaf(versions, cut_plans[0], crossings[0]) for versions in leaves),
            input_names=self.inputs.names,
            input_structure=pytree.treespec_dumps(self.inputs.structure),
            parts={part: tuple(n for n in self.tensors if n in side) for part, side in zip(PARTS, sides, strict=False)},
            untied=untied,
        )

    def _check_order(self, first: str, second: str) -> None:
        exits = [self.traces[0].calls[self.crossings[0].calls_of(cut)[0]].exit for cut in (first, second)]
        if exits[0] >= exits[1]:
            raise SplitError(f"the second cut must come after the first one; '{second}' does not come after '{first}'")
        if not self.parameters & self._used_by([first, second])[1]:
            raise SplitError(f"no parameters lie between the cuts '{first}' and '{second}'")

    def _resolve_shared(self, sides: list[set[str]], cuts: Sequence[str], tied: Tied) -> tuple[str, ...]:
        """Refuse trainable parameters on two sides, or untie them where they have a name on each."""
        for name in self.tensors:
            if self.tensors[name].requires_grad and sum(name in side for side in sides) > 1:
                raise SplitError(
                    f"the parameter '{name}' is used on both sides of the cut {' and '.join(cuts)}; freeze it, or cut "
                    "where one side uses it"
                )
        holders: dict[int, list[tuple[str, int]]] = {}
        for side, names in enumerate(sides):
            for name in self.tensors:
                if name in names and self.tensors[name].requires_grad:
                    holders.setdefault(id(self.tensors[name]), []).append((name, side))
        untied = []
        for held in holders.values():
            first, *others = held
            for name, side in others:
                if side == first[1]:
                    continue
                if tied == "refuse":
                    raise SplitError(
                        f"'{first[0]}' and '{name}' are the same weights on both sides of the cut "
                        f'{" and ".join(cuts)}; pass tied="untie" to train them apart, or freeze them'
                    )
                untied.append(name)
        return tuple(untied)


class _CutPlanner:
    """Unites what the traces say about one cut."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis

    def plan(self, cut: str, found: list[Crossing]) -> CutPlan:
        keys = _united([list(crossing.earlier) for crossing in found])
        sent = self._sent(cut, keys, found)
        repeated = set().union(*(crossing.repeated for crossing in found)) - {Key(s.module, s.nth) for s in sent}
        tensors = tuple(self._tensor(leaf, found) for leaf in sent)
        inputs = sorted(set().union(*(crossing.inputs for crossing in found)))
        plan = CutPlan(cut, tensors + tuple(map(self._input, inputs)), (), ())
        calls = tuple(self._call(key, found, plan) for key in keys if key not in repeated)
        return CutPlan(cut, plan.tensors, calls, tuple(sorted({key.module for key in repeated})))

    def _sent(self, cut: str, keys: list[Key], found: list[Crossing]) -> list[LeafKey]:
        """The cut's own output first, then the rest in the order of the forward pass."""
        sent = set().union(*(crossing.sent for crossing in found))
        order = {key: position for position, key in enumerate(keys)}
        return sorted(sent, key=lambda leaf: (leaf.module != cut, order[Key(leaf.module, leaf.nth)], leaf.leaf))

    def _versions(self, key: Key, found: list[Crossing]) -> list[list[Leaf] | None]:
        """The leaves of a call in every trace; None where it was not made."""
        return [
            trace.calls[crossing.earlier[key]].leaves if key in crossing.earlier else None
            for trace, crossing in zip(self.analysis.traces, found, strict=True)
        ]

    def _tensor(self, sent: LeafKey, found: list[Crossing]) -> BoundaryTensor:
        versions = [v for v in self._versions(Key(sent.module, sent.nth), found) if v and len(v) > sent.leaf]
        leaves = [leaves[sent.leaf] for leaves in versions]
        several = len([leaf for leaf in versions[0] if leaf.is_tensor]) > 1
        name = sent.module + (f"({sent.nth})" if sent.nth else "") + (f"[{sent.leaf}]" if several else "")
        inline = any(sent in crossing.written_inline for crossing in found)
        return BoundaryTensor(
            name=name,
            module=sent.module,
            nth=sent.nth,
            leaf=sent.leaf,
            shape=leaves[0].shape,
            dtype=dtype_name(leaves[0].dtype),
            batched=_batched([leaf.shape for leaf in leaves]),
            copied=inline or any(sent in crossing.written_later for crossing in found),
            sent_as_returned=inline,
        )

    def _input(self, index: int) -> BoundaryTensor:
        leaves = [trace.inputs[index] for trace in self.analysis.traces]
        return BoundaryTensor(
            name=self.analysis.inputs.names[index],
            module=None,
            nth=0,
            leaf=index,
            shape=leaves[0].shape,
            dtype=dtype_name(leaves[0].dtype),
            batched=_batched([leaf.shape for leaf in leaves]),
            copied=False,
        )

    def _call(self, key: Key, found: list[Crossing], plan: CutPlan) -> CallPlan:
        versions = self._versions(key, found)
        made = next(i for i, leaves in enumerate(versions) if leaves is not None)
        call = self.analysis.traces[made].calls[found[made].earlier[key]]
        assert call.structure is not None
        leaves = []
        for position, leaf in enumerate(call.leaves):
            same = [v[position] if v and len(v) == len(call.leaves) else None for v in versions]
            leaves.append(self.leaf(same, plan, found) if leaf.is_tensor else _plain_leaf_plan(leaf.value))
        return CallPlan(key.module, key.nth, _dump(call.structure, key.module), tuple(leaves))

    def leaf(self, versions: Sequence[Leaf | None], plan: CutPlan, found: list[Crossing]) -> LeafPlan:
        """A leaf with its dimensions expressed by those of the boundary tensors, as all traces have them."""
        known = [i for i, leaf in enumerate(versions) if leaf is not None]
        leaves = [leaf for leaf in versions if leaf is not None]
        if not leaves[0].is_tensor:
            return _plain_leaf_plan(leaves[0].value)
        boundary = self._boundary_shapes(plan, found, known)
        shapes = [leaf.shape for leaf in leaves]
        if len({len(shape) for shape in shapes}) > 1:
            return LeafPlan(dtype_name(leaves[0].dtype), tuple(Dimension(size, known=False) for size in shapes[0]))
        dimensions = (_dimension(sizes, axis, boundary) for axis, sizes in enumerate(zip(*shapes, strict=True)))
        return LeafPlan(dtype_name(leaves[0].dtype), tuple(dimensions))

    def _boundary_shapes(self, plan: CutPlan, found: list[Crossing], known: list[int]) -> list[list[tuple[int, ...]]]:
        shapes = []
        for tensor in plan.tensors:
            if tensor.module is None:
                shapes.append([self.analysis.traces[i].inputs[tensor.leaf].shape for i in known])
                continue
            versions = self._versions(Key(tensor.module, tensor.nth), found)
            shapes.append([v[tensor.leaf].shape if (v := versions[i]) else () for i in known])
        return shapes


def _dimension(sizes: tuple[int, ...], axis: int, boundary: list[list[tuple[int, ...]]]) -> Dimension:
    """How one size follows from the boundary tensors', given both in every trace: constant, or in proportion."""
    if len(set(sizes)) == 1 and len(sizes) > 1:
        return Dimension(sizes[0])
    matches = []
    for tensor, shapes in enumerate(boundary):
        if len({len(shape) for shape in shapes}) > 1:
            continue
        for dimension, theirs in enumerate(zip(*shapes, strict=True)):
            ratios = {Fraction(mine, other) if other else None for mine, other in zip(sizes, theirs, strict=True)}
            if len(ratios) == 1 and (ratio := ratios.pop()) is not None:
                matches.append((ratio != 1, dimension != axis, tensor, dimension, ratio))
    if not matches:
        return Dimension(sizes[0], known=len(set(sizes)) == 1)
    _, _, tensor, dimension, ratio = min(matches)
    return Dimension(ratio.numerator, ratio.denominator, tensor, dimension)


def _batched(shapes: list[tuple[int, ...]]) -> bool:
    return bool(shapes[0]) and (len(shapes) == 1 or len({shape[0] for shape in shapes}) > 1)


def _plain_leaf_plan(value: Any) -> LeafPlan:
    return LeafPlan(None, value=value if isinstance(value, bool | int | float | str) else None)


def _dump(structure: pytree.TreeSpec, module: str) -> str:
    try:
        return pytree.treespec_dumps(structure)
    except NotImplementedError as error:
        raise SplitError(f"what '{module}' returns cannot be written down in a plan: {error}") from None


def _united(orders: list[list[Key]]) -> list[Key]:
    """All keys, in an order that agrees with each of the given ones where they agree with each other."""
    longest = max(orders, key=len)
    return list(dict.fromkeys([*longest[:-1], *(key for order in orders for key in order[:-1]), longest[-1]]))


def _sides_of_calls(crossings: Crossings, module: str, cuts: Iterable[str]) -> set[int]:
    trace = crossings.trace
    times = [trace.calls[crossings.calls_of(cut)[0]].exit for cut in cuts]
    sides = set()
    for position in crossings.calls_of(module):
        call = trace.calls[position]
        sides |= {sum(call.enter >= time for time in times), sum(call.exit > time for time in times)}
    return sides


def _uses_of(trace: Trace) -> dict[str, list[int]]:
    uses: dict[str, list[int]] = {}
    for position, node in enumerate(trace.nodes):
        for read in node.reads:
            for name in _names_used(trace, read, node.call) if trace.nodes[read].kind == "state" else ():
                uses.setdefault(name, []).append(position)
    return uses


def _names_used(trace: Trace, state: int, call: int) -> tuple[str, ...]:
    """The name under which a running module holds it; all names if it is tied and none of them does."""
    names = trace.state_names[state]
    if len(names) > 1:
        for running in (call, *trace.ancestors(call)):
            own = tuple(name for name in names if name.rpartition(".")[0] == trace.calls[running].name)
            if own:
                return own
    return names

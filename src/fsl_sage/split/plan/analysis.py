"""Where a model can be cut, and the plan of each cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsl_sage.split.errors import SplitError
from fsl_sage.split.plan.crossing import Crossing, Crossings, Key, LeafKey
from fsl_sage.split.plan.planner import CutPlanner
from fsl_sage.split.plan.split_plan import BoundaryTensor, SplitPlan
from fsl_sage.split.trace.inputs import Inputs
from fsl_sage.split.trace.recording import Trace, record
from fsl_sage.split.trace.skeleton import named_tensors, on_meta, own_buffers, skeleton, without_data
from fsl_sage.split.trace.structures import dump_structure

T = TypeVar("T")
MakeTensor = Callable[[Tensor], Tensor]
Tied = Literal["refuse", "untie"]
PARTS = ("client", "server", "head")
_NO_PARAMETERS = "no parameters come"
_ELSEWHERE = ", or cut elsewhere"
LARGE = 2**28
"""Bytes of parameters and buffers."""


class Analysis:
    """The traces of a model: as it evaluates, as it trains on a larger batch, and on a shorter sequence."""

    def __init__(self, model: nn.Module, example: Any, private: Collection[str] = ()) -> None:
        _refuse_compiled(model)
        self.inputs = Inputs.of(model, example, private)
        self.model = model
        self.tensors = named_tensors(model)
        self.parameters = {name for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}
        self.traces = self._take_traces()
        trained = {name for name in self.parameters if self.tensors[name].requires_grad}
        self.crossings = [Crossings(trace, set(self.inputs.raw), trained) for trace in self.traces]
        self._planner = CutPlanner(self.traces, self._samples, self.inputs.batch, self.inputs.names)
        self._named_modules = dict(model.named_modules())

    @cached_property
    def saved(self) -> set[str]:
        """The names in the model's state_dict."""
        return set(self.model.state_dict())

    @property
    def on_meta(self) -> bool:
        """Whether the model is on the meta device."""
        return any(tensor.is_meta for tensor in self.tensors.values())

    @property
    def is_large(self) -> bool:
        """Whether running it costs too much, be it only on two samples, or is impossible."""
        return self.on_meta or sum(tensor.nbytes for tensor in self.tensors.values()) > LARGE

    @property
    def cuda_devices(self) -> list[int]:
        """The numbers of the GPUs that the model is on."""
        devices = {tensor.device for tensor in self.tensors.values()}
        return sorted(device.index or 0 for device in devices if device.type == "cuda")

    # -- traces --------------------------------------------------------------------------------------------------------

    def _take_traces(self) -> list[Trace]:
        """Besides the plain trace, those that tell which dimensions follow the batch and the sequence.

        They are taken on two samples. A model that cannot run a variant (a fixed batch, one sample in BatchNorm) is
        planned from those that it can.
        """
        inputs = self.inputs.few()
        plain = self._try_trace(inputs.leaves, training=False)
        if plain is None:
            inputs = self.inputs
            plain = self._trace(inputs.leaves, training=False)
        traces: list[tuple[Trace | None, int]] = [(plain, inputs.batch)]
        doubled, shortened = inputs.doubled(), inputs.shortened()
        if larger := self._try_trace(doubled, training=True):
            traces.append((larger, 2 * inputs.batch))
        else:
            traces.append((self._try_trace(doubled, training=False), 2 * inputs.batch))
            traces.append((self._try_trace(inputs.leaves, training=True), inputs.batch))
        if shortened is not None:
            traces.append((self._try_trace(shortened, training=False), inputs.batch))
        self._samples = [samples for trace, samples in traces if trace]
        return [trace for trace, _ in traces if trace]

    def _try_trace(self, leaves: tuple[Any, ...], training: bool) -> Trace | None:
        try:
            return self._trace(leaves, training)
        except Exception:
            return None

    def _trace(self, leaves: tuple[Any, ...], training: bool) -> Trace:
        def run(tensor: MakeTensor, context: AbstractContextManager[Any]) -> Trace:
            return self._record(leaves, training, tensor, context)

        return self.cheaply(run)

    def cheaply(self, run: Callable[[MakeTensor, AbstractContextManager[Any]], T]) -> T:
        """`run` the model on its data, or, if it is large, on the meta device, where nothing is computed.

        It is told what to make of the model's tensors and in which context to run. Code that looks at values does not
        run on the meta device. A model that is itself there is then run as if it were on the CPU, any other one on its
        data.
        """
        if self.is_large:
            try:
                return run(on_meta, nullcontext())
            except Exception:
                pass
        if self.on_meta:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            return run(lambda tensor: without_data(fake, tensor), fake)
        with torch.random.fork_rng(devices=self.cuda_devices):
            return run(own_buffers, nullcontext())

    def _record(
        self,
        leaves: tuple[Any, ...],
        training: bool,
        tensor: MakeTensor,
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
            raise SplitError(f"the model cannot be cut at '{cut}': {obstacle}; {self.advice()}")
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
        crossing = set().union(*(crossing.sent for crossing in found))
        for leaf in crossing:
            if self._is_complex(leaf, found):
                return f"'{leaf.module}' returns complex numbers; let torch.view_as_real of them cross"
        sent = [leaf for leaf in crossing if leaf.module == cut]
        call = self.traces[0].calls[self.crossings[0].calls_of(cut)[0]]
        if not any(self.crossings[0].from_raw(call.leaves[leaf.leaf].node) for leaf in sent):
            return "what it returns does not carry the input on to the output"
        held = [self.parameters & names for names in self._used_by([cut])]
        if not held[0]:
            return f"{_NO_PARAMETERS} before it"
        if not held[1]:
            return f"{_NO_PARAMETERS} after it"
        shared = [name for name in self.tensors if name in held[0] & held[1] and self.tensors[name].requires_grad]
        return _of_both_sides(shared) if shared else None

    def _is_complex(self, sent: LeafKey, found: list[Crossing]) -> bool:
        """Whether a tensor that crosses is complex: gradients of such come from real ones only."""
        for trace, crossing in zip(self.traces, found, strict=True):
            position = crossing.earlier.get(Key(sent.module, sent.nth))
            leaves = [] if position is None else trace.calls[position].leaves
            if len(leaves) > sent.leaf and leaves[sent.leaf].dtype.is_complex:
                return True
        return False

    def why_nowhere(self) -> str:
        """Of a model that cannot be cut anywhere the reason, as the end of a sentence."""
        names = dict.fromkeys(call.name for call in self.traces[0].calls[1:])
        obstacles = {name: obstacle for name in names if (obstacle := self._obstacle(name)) is not None}
        telling = {name: obstacle for name, obstacle in obstacles.items() if not obstacle.startswith(_NO_PARAMETERS)}
        if not telling:
            return "its parameters are all in one module"
        # A weight that is used on both sides is what may be changed soonest.
        name = next((name for name, obstacle in telling.items() if "on both sides" in obstacle), next(iter(telling)))
        return f"at '{name}', for instance, {telling[name].removesuffix(_ELSEWHERE)}"

    def advice(self) -> str:
        """The cuts that work, as the end of a sentence."""
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
        used = self._used_by(cuts)
        sides = [set(names) for names in used]
        for name in self.tensors:
            if not any(name in names for names in used):
                sides[self._side_of_unused(name, cuts, used)].add(name)
        return sides

    def _used_by(self, cuts: Sequence[str]) -> list[set[str]]:
        """The parameters and buffers that each part uses."""
        sides: list[set[str]] = [set() for _ in range(len(cuts) + 1)]
        for crossings, uses in zip(self.crossings, self._uses, strict=True):
            times = [crossings.trace.calls[crossings.calls_of(cut)[0]].exit for cut in cuts]
            ends = [*times, len(crossings.trace.nodes)]
            for name, positions in uses.items():
                passed = 0
                for side, end in enumerate(ends):
                    within = bisect_left(positions, end)
                    if within > passed:
                        sides[side].add(name)
                    passed = within
        for side, cut in enumerate(cuts):
            for crossings, crossing in zip(self.crossings, self._crossing_at.get(cut, []), strict=False):
                for node in crossing.states_again:
                    sides[side + 1].update(crossings.trace.state_names[node])
        return sides

    def _side_of_unused(self, name: str, cuts: Sequence[str], used: Sequence[set[str]]) -> int:
        """Where the same weights are used under another name; else with the module around it.

        That is the innermost one that one part alone runs; if there is none, it goes with the server's part.
        """
        twins = {other for other, tensor in self.tensors.items() if tensor is self.tensors[name]}
        for side, names in enumerate(used):
            if names & twins:
                return side
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
        parts, untied = self.parts(cuts, tied)
        cut_plans = tuple(self._planner.plan(cut, crossing) for cut, crossing in zip(cuts, crossings, strict=True))
        leaves = [[trace.inputs[i] for trace in self.traces] for i in range(len(self.inputs.leaves))]
        return SplitPlan(
            cuts=cut_plans,
            inputs=tuple(self._planner.leaf(versions, cut_plans[0], crossings[0]) for versions in leaves),
            input_names=self.inputs.names,
            input_structure=dump_structure(self.inputs.structure),
            parts=parts,
            untied=untied,
        )

    def parts(self, cuts: Sequence[str], tied: Tied = "refuse") -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
        """The parameters and buffers of each part, and those that must be untied."""
        sides = self._sides(cuts)
        untied = self._resolve_shared(sides, cuts, tied)
        return {
            part: tuple(n for n in self.tensors if n in side) for part, side in zip(PARTS, sides, strict=False)
        }, untied

    def boundary(self, cut: str) -> tuple[BoundaryTensor, ...]:
        """What crosses at a cut."""
        return self._planner.tensors(cut, self.crossing(cut))

    def _check_order(self, first: str, second: str) -> None:
        exits = [self.traces[0].calls[self.crossings[0].calls_of(cut)[0]].exit for cut in (first, second)]
        if exits[0] >= exits[1]:
            raise SplitError(f"the second cut must come after the first one; '{second}' does not come after '{first}'")
        if not self.parameters & self._used_by([first, second])[1]:
            raise SplitError(f"no parameters lie between the cuts '{first}' and '{second}'")

    def _resolve_shared(self, sides: list[set[str]], cuts: Sequence[str], tied: Tied) -> tuple[str, ...]:
        """Refuse trainable weights that have a name on each of two sides, or untie them."""
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


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse what torch has compiled: nobody calls its modules one by one any more, so it can be cut nowhere."""
    for name, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted or hasattr(module, "_orig_mod"):  # the class of the latter would import the compiler
            what = f"the model's module '{name}'" if name else "the model"
            by = "torch.jit" if scripted else "torch.compile"
            raise SplitError(f"{what} was compiled by {by}, so it cannot be cut: give it as it was before")


def _of_both_sides(shared: list[str]) -> str:
    """Why these trainable parameters stand in the way, as the end of a sentence."""
    holders = " ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in shared))
    is_used, them = ("is", "it") if len(shared) == 1 else (f"and {len(shared) - 1} others are", "them")
    return (
        f"the parameter '{shared[0]}' {is_used} used on both sides; freeze {them} (in a run: --model.frozen "
        f"{holders}){_ELSEWHERE}"
    )


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

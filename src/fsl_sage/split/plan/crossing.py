"""What must cross a cut, read off a trace.

With the cut at one module call, every other call is one of three kinds. *Open* calls contain the cut: their code runs
on both sides. *Earlier* calls, made by open calls, returned before the cut did: on the server's side they are stubs.
The rest comes after. A value that is used after the cut and was made before it
- is what an earlier call returned: it is sent, or the call is repeated on the server's side if it needs neither
  trained parameters nor the raw input (rotary embeddings, masks);
- or was computed between the calls, by the code of an open call: that code runs again, on values that are sent;
- or is an input besides the raw one (a mask, position ids): it is sent along;
- or is none of these, and then the model cannot be cut there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fsl_sage.split.trace.recording import Node, Trace


class Key(NamedTuple):
    """An earlier call: the module, and which of its calls by open calls before the cut it is."""

    module: str
    nth: int


class LeafKey(NamedTuple):
    """One leaf of what an earlier call returned."""

    module: str
    nth: int
    leaf: int


@dataclass
class Crossing:
    """What crosses one cut. Keys are the same in every trace of a model, so that crossings can be united."""

    earlier: dict[Key, int] = field(default_factory=dict)
    """The earlier calls, by their position in the trace; the cut is the last one."""
    sent: set[LeafKey] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    repeated: set[Key] = field(default_factory=set)
    written_inline: set[LeafKey] = field(default_factory=set)
    """Sent leaves that code of open calls changes in place before the cut: sent as they were returned."""
    written_later: set[LeafKey] = field(default_factory=set)
    """Sent leaves that are changed in place on the server's side."""
    states_again: set[int] = field(default_factory=set)
    """State nodes that the repeated code before the cut reads."""
    used_on_both_sides: bool = False
    """Whether a value computed between the calls is used on both sides."""
    obstacles: list[str] = field(default_factory=list)
    """Why the model cannot be cut here, as ends of a sentence."""


class Crossings:
    """The crossings of one trace, cut by cut."""

    def __init__(self, trace: Trace, raw_inputs: set[str], trained: set[str]) -> None:
        """Read the crossings off a trace; `trained` are the parameters that are not frozen."""
        self.trace = trace
        self.raw_inputs = raw_inputs
        self.trained = trained
        self._from_raw = self._closure(lambda node: node.kind == "input" and node.what in raw_inputs)
        self._not_free = self._closure(
            lambda node: (
                (node.kind == "input" and node.what in raw_inputs)
                or (node.kind == "state" and node.what in trained)
                or node.random
            )
        )
        self._leaf_at = {leaf.node: (c, k) for c, call in enumerate(trace.calls) for k, leaf in enumerate(call.leaves)}
        self._calls_of: dict[str, list[int]] = {}
        for position, call in enumerate(trace.calls):
            self._calls_of.setdefault(call.name, []).append(position)

    def _closure(self, start: Callable[[Node], bool]) -> list[bool]:
        """For every node, whether it or anything that it was computed from satisfies `start`."""
        holds: list[bool] = []
        for node in self.trace.nodes:
            holds.append(start(node) or any(holds[read] for read in node.reads))
        return holds

    def calls_of(self, module: str) -> list[int]:
        """The calls of a module, by their positions in the trace."""
        return self._calls_of.get(module, [])

    def from_raw(self, node: int) -> bool:
        """Whether a node's value depends on the raw input."""
        return self._from_raw[node]

    def at(self, call: int) -> Crossing:
        """What crosses the cut at the end of `call`."""
        return _Search(self, call).run()

    def is_free(self, node: int) -> bool:
        """Whether a node's value depends on neither the raw input nor a trained parameter nor chance."""
        return not self._not_free[node]


class _Search:
    """Follows what is used after the cut back to what can be sent or repeated."""

    def __init__(self, crossings: Crossings, cut: int) -> None:
        self.crossings = crossings
        self.trace = crossings.trace
        self.cut = cut
        self.time = self.trace.calls[cut].exit
        self.open = {-1, *self.trace.ancestors(cut)}
        self.crossing = Crossing()
        self.keys: dict[int, Key] = {}
        self.wanted: dict[Key, dict[int, int]] = {}
        """The leaves of earlier calls that are used after the cut, with their nodes."""
        self.hidden_writes: list[Node] = []
        self._inline: set[int] = set()
        self._seen: set[int] = set()

    def run(self) -> Crossing:
        """Find all that crosses the cut."""
        self._find_earlier_calls()
        self._follow(self._used_after_the_cut())
        self._send_or_repeat()
        self._look_for_writes()
        self.crossing.used_on_both_sides = bool(self._inline & self._used_before_the_cut())
        return self.crossing

    def _used_before_the_cut(self) -> set[int]:
        inside_earlier_calls = (node for node in self.trace.nodes[: self.time] if node.call not in self.open)
        return {read for node in inside_earlier_calls for read in node.reads}

    def _find_earlier_calls(self) -> None:
        counts: dict[str, int] = {}
        for position, call in enumerate(self.trace.calls):
            if call.parent in self.open and 0 <= call.exit <= self.time and position not in self.open:
                key = Key(call.name, counts.get(call.name, 0))
                counts[call.name] = key.nth + 1
                self.keys[position] = key
                self.crossing.earlier[key] = position

    def _used_after_the_cut(self) -> Iterable[int]:
        nodes = self.trace.nodes
        for node in nodes[self.time :]:
            if node.kind == "operation":
                yield from node.reads
        for leaf in self.trace.calls[0].leaves:
            if leaf.is_tensor:
                yield leaf.node
        # The model's code may branch before the cut on a mask: the server must then see it too. What it reads of the
        # raw input (a warning about padding) it cannot see; comparisons with the whole model guard that.
        for position, node in enumerate(nodes[: self.time]):
            if node.into_python and node.call in self.open and self.crossings.is_free(position):
                yield from node.reads

    def _follow(self, start: Iterable[int]) -> None:
        pending = list(start)
        while pending:
            position = pending.pop()
            if position not in self._seen:
                self._seen.add(position)
                pending.extend(self._step(position, self.trace.nodes[position]))

    def _step(self, position: int, node: Node) -> Iterable[int]:
        """What else is needed on the server's side because this node's value is."""
        if node.kind == "state":
            return ()
        if node.kind == "input":
            self._need_input(node)
            return ()
        if node.kind == "leaf":
            call, leaf = self.crossings._leaf_at[position]
            if call in self.keys:
                self.wanted.setdefault(self.keys[call], {})[leaf] = position
                return ()
            if position >= self.time or call in self.open:
                return node.reads
            return self._need_inner_value(position, call)
        if position >= self.time:
            return ()
        if node.call in self.open:
            return self._need_inline_value(position, node)
        if node.writes:
            self.hidden_writes.append(node)
            return ()
        return self._need_inner_value(position, node.call)

    def _need_input(self, node: Node) -> None:
        if node.what in self.crossings.raw_inputs:
            self.crossing.obstacles.append(f"the raw input '{node.what}' is used after it, and raw inputs never cross")
            return
        index = next(i for i, leaf in enumerate(self.trace.inputs) if self.trace.nodes[leaf.node] is node)
        self.crossing.inputs.add(index)

    def _need_inline_value(self, position: int, node: Node) -> Iterable[int]:
        if node.random:
            where = self.trace.calls[node.call].name or "the model"
            self.crossing.obstacles.append(f"a random number drawn by '{node.what}' in {where} is used on both sides")
        if not self.crossings.is_free(position):
            self._inline.add(position)
        self.crossing.states_again.update(read for read in node.reads if self.trace.nodes[read].kind == "state")
        return node.reads

    def _need_inner_value(self, position: int, call: int) -> Iterable[int]:
        """A value that was made inside an earlier call and left it other than by being returned."""
        outer = self._earlier_call_around(call)
        key = self.keys[outer]
        if self._can_repeat(key, [position]):
            self.wanted.setdefault(key, {})
            self.crossing.repeated.add(key)
            return self._reads_from_outside(outer)
        self.crossing.obstacles.append(
            f"a value made inside '{key.module}', which it does not return, is used after it"
        )
        return ()

    def _earlier_call_around(self, call: int) -> int:
        while call not in self.keys:
            call = self.trace.calls[call].parent
        return call

    def _send_or_repeat(self) -> None:
        for key, leaves in list(self.wanted.items()):
            is_cut = self.crossing.earlier[key] == self.cut
            if not is_cut and self._can_repeat(key, leaves.values()):
                self.crossing.repeated.add(key)
                self._follow(self._reads_from_outside(self.crossing.earlier[key]))
            else:
                self.crossing.repeated.discard(key)
                self.crossing.sent.update(LeafKey(*key, leaf) for leaf in leaves)
        # Repeating a call may have made further leaves needed.
        for key, leaves in self.wanted.items():
            if key not in self.crossing.repeated:
                self.crossing.sent.update(LeafKey(*key, leaf) for leaf in leaves)

    def _can_repeat(self, key: Key, nodes: Iterable[int]) -> bool:
        return all(self.crossings.is_free(node) for node in nodes) and not self._has_trained(key)

    def _inside(self, call: int) -> range:
        return range(self.trace.calls[call].enter, self.trace.calls[call].exit)

    def _has_trained(self, key: Key) -> bool:
        nodes = self.trace.nodes
        return any(
            nodes[read].kind == "state" and nodes[read].what in self.crossings.trained
            for position in self._inside(self.crossing.earlier[key])
            for read in nodes[position].reads
        )

    def _reads_from_outside(self, call: int) -> Iterable[int]:
        """What the free part of a repeated call reads that was made outside of it."""
        inside = self._inside(call)
        for position in inside:
            if not self.crossings.is_free(position):
                continue
            for read in self.trace.nodes[position].reads:
                if self.trace.nodes[read].kind == "state":
                    self.crossing.states_again.add(read)
                elif read not in inside:
                    yield read

    def _look_for_writes(self) -> None:
        nodes = self.trace.nodes
        storages: dict[int, list[tuple[int, LeafKey]]] = {}
        for leaf in self.crossing.sent:
            call = self.trace.calls[self.crossing.earlier[Key(leaf.module, leaf.nth)]]
            position = call.leaves[leaf.leaf].node
            storages.setdefault(nodes[position].storage, []).append((position, leaf))
        for position, node in enumerate(nodes):
            for storage in node.writes:
                for returned, leaf in storages.get(storage, ()):
                    if position >= self.time:
                        self.crossing.written_later.add(leaf)
                    elif position > returned and node.call in self.open:
                        self.crossing.written_inline.add(leaf)
        for node in self.hidden_writes:
            written = [leaf for storage in node.writes for _, leaf in storages.get(storage, ())]
            if not written or self.crossing.written_inline.intersection(written):
                module = self.keys[self._earlier_call_around(node.call)].module
                self.crossing.obstacles.append(f"'{module}' changes in place a value that is used after it")

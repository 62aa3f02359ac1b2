"""From what crosses a cut to its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch.utils import _pytree as pytree

from fsl_sage.split.errors import SplitError
from fsl_sage.split.plan.crossing import Crossing, Key, LeafKey
from fsl_sage.split.plan.split_plan import BoundaryTensor, CallPlan, CutPlan, Dimension, LeafPlan, dtype_name
from fsl_sage.split.trace.recording import Leaf, Trace
from fsl_sage.split.trace.structures import dump_structure


class CutPlanner:
    """Unites what the traces say about one cut.

    `samples` is the size of the batch in each trace, `batch` that in the example.
    """

    def __init__(self, traces: list[Trace], samples: list[int], batch: int, input_names: tuple[str, ...]) -> None:
        self.traces = traces
        self.samples = samples
        self.batch = batch
        self.input_names = input_names

    def plan(self, cut: str, found: list[Crossing]) -> CutPlan:
        """What crosses a cut, and what each call behind it gets; `found` has the crossings by trace."""
        tensors = self.tensors(cut, found)
        sent = {Key(tensor.module, tensor.nth) for tensor in tensors if tensor.module is not None}
        repeated = set().union(*(crossing.repeated for crossing in found)) - sent
        plan = CutPlan(cut, tensors, (), tuple(sorted({key.module for key in repeated})))
        calls = tuple(self._call(key, found, plan) for key in _united(found) if key not in repeated)
        return replace(plan, calls=calls)

    def tensors(self, cut: str, found: list[Crossing]) -> tuple[BoundaryTensor, ...]:
        """The cut's own output first, then the rest in the order of the forward pass, then inputs."""
        order = {key: position for position, key in enumerate(_united(found))}
        sent = sorted(
            set().union(*(crossing.sent for crossing in found)),
            key=lambda leaf: (leaf.module != cut, order[Key(leaf.module, leaf.nth)], leaf.leaf),
        )
        inputs = sorted(set().union(*(crossing.inputs for crossing in found)))
        of_cut, *others = (self._tensor(leaf, found) for leaf in sent)
        others = [self._for_each(tensor) if tensor.module == cut and of_cut.batched else tensor for tensor in others]
        return (of_cut, *others, *map(self._input, inputs))

    def _for_each(self, tensor: BoundaryTensor) -> BoundaryTensor:
        """What the cut returns once for a batch, such as T5's position bias, is sent for each sample.

        Its module carries the input, too, so it cannot be repeated behind the cut.
        """
        if tensor.batched or not tensor.has_gradient or len(tensor.shape) < 2 or tensor.shape[0] != 1:
            return tensor
        return replace(tensor, shape=(self.batch, *tensor.shape[1:]), batched=True, for_each=True)

    def _versions(self, key: Key, found: list[Crossing]) -> list[list[Leaf] | None]:
        """The leaves of a call in every trace; None where it was not made."""
        return [
            trace.calls[crossing.earlier[key]].leaves if key in crossing.earlier else None
            for trace, crossing in zip(self.traces, found, strict=True)
        ]

    def _tensor(self, sent: LeafKey, found: list[Crossing]) -> BoundaryTensor:
        versions = [v if v and len(v) > sent.leaf else None for v in self._versions(Key(sent.module, sent.nth), found)]
        leaves = [v[sent.leaf] if v else None for v in versions]
        several = any(len([leaf for leaf in v if leaf.is_tensor]) > 1 for v in versions if v)
        name = sent.module + (f"({sent.nth})" if sent.nth else "") + (f"[{sent.leaf}]" if several else "")
        inline = any(sent in crossing.written_inline for crossing in found)
        return BoundaryTensor(
            name=name,
            module=sent.module,
            nth=sent.nth,
            leaf=sent.leaf,
            **self._shape_in_example(leaves),
            copied=inline or any(sent in crossing.written_later for crossing in found),
            sent_as_returned=inline,
        )

    def _input(self, index: int) -> BoundaryTensor:
        leaves: list[Leaf | None] = [trace.inputs[index] for trace in self.traces]
        return BoundaryTensor(
            name=self.input_names[index],
            module=None,
            nth=0,
            leaf=index,
            **self._shape_in_example(leaves),
            copied=False,
        )

    def _shape_in_example(self, versions: list[Leaf | None]) -> dict[str, Any]:
        """Shape and type of a tensor as it travels, and whether its first dimension follows the batch."""
        first = next(i for i, leaf in enumerate(versions) if leaf is not None)
        leaf = versions[first]
        assert leaf is not None
        others = [
            v.shape for v, n in zip(versions, self.samples, strict=True) if v is not None and n != self.samples[first]
        ]
        same_rank = [shape for shape in others if len(shape) == len(leaf.shape)]
        follows = [
            any(shape[i] != size for shape in same_rank) or (i == 0 and not others) for i, size in enumerate(leaf.shape)
        ]
        shape = [
            size * self.batch // self.samples[first] if grows and others else size
            for size, grows in zip(leaf.shape, follows, strict=True)
        ]
        # Elsewhere than in front a dimension is that of the samples only if it has their number: [L, B, C].
        batches = [i for i, grows in enumerate(follows) if grows and i in (0, *_where(leaf.shape, self.samples[first]))]
        moved = batches[0] if batches else 0
        return {
            "shape": tuple(shape[moved : moved + 1] + shape[:moved] + shape[moved + 1 :]),
            "dtype": dtype_name(leaf.dtype),
            "batched": bool(batches),
            "batch_dimension": moved,
        }

    def _call(self, key: Key, found: list[Crossing], plan: CutPlan) -> CallPlan:
        versions = self._versions(key, found)
        made = next(i for i, leaves in enumerate(versions) if leaves is not None)
        call = self.traces[made].calls[found[made].earlier[key]]
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
                shapes.append([self.traces[i].inputs[tensor.leaf].shape for i in known])
                continue
            versions = self._versions(Key(tensor.module, tensor.nth), found)
            shapes.append([v[tensor.leaf].shape if (v := versions[i]) else () for i in known])
        return shapes


def _where(shape: Sequence[int], size: int) -> list[int]:
    return [i for i, own in enumerate(shape) if own == size]


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


def _plain_leaf_plan(value: Any) -> LeafPlan:
    return LeafPlan(None, value=value if isinstance(value, bool | int | float | str) else None)


def _dump(structure: pytree.TreeSpec, module: str) -> str:
    try:
        return dump_structure(structure)
    except NotImplementedError as error:
        raise SplitError(f"what '{module}' returns cannot be written down in a plan: {error}") from None


def _united(found: list[Crossing]) -> list[Key]:
    """The earlier calls of all traces, the cut last, in an order that agrees with each where they agree."""
    orders = [list(crossing.earlier) for crossing in found]
    longest = max(orders, key=len)
    return list(dict.fromkeys([*longest[:-1], *(key for order in orders for key in order[:-1]), longest[-1]]))

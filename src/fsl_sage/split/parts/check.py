"""The proof that a split computes what the model does: both are run on the example and compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fsl_sage.split.errors import SplitError
from fsl_sage.split.parts.gates import Boundary
from fsl_sage.split.parts.part import Split
from fsl_sage.split.plan.analysis import Analysis
from fsl_sage.split.plan.split_plan import SplitPlan

_WRITES_INTO_PLACEHOLDER = "more than one element of the written-to tensor refers"


def checked(analysis: Analysis, plan: SplitPlan) -> Split:
    """A split after its output on the example, in evaluation mode, has been the whole model's."""
    try:
        split = _compared(analysis, plan)
    except RuntimeError as error:
        if _WRITES_INTO_PLACEHOLDER not in str(error):
            raise
        split = _compared(analysis, replace(plan, dense=True))
    return split if split.plan.tensors_tell_shapes else _with_example_sizes(analysis, split)


def _compared(analysis: Analysis, plan: SplitPlan) -> Split:
    split = Split(analysis.model, plan)
    with _trial(analysis, split):
        expected = _called(analysis.model, analysis, analysis.inputs.leaves)
        split.example = _called(split.client, analysis, analysis.inputs.leaves)
        _compare(expected, _later_parts(split, split.example, shapes=True), plan)
        if plan.tensors_tell_shapes:
            _compare(expected, _later_parts(split, split.example, shapes=False), plan)
        for leaves in _other_inputs(analysis):
            _compare_on(analysis, split, leaves)
        if not plan.dense and not analysis.on_meta:
            _train_once(analysis, split)
    return split


def _train_once(analysis: Analysis, split: Split) -> None:
    """Run the parts in training mode, where a model may write into its buffers; whatever else fails then is let be."""
    for part in split.parts:
        part.train()
    try:
        _later_parts(split, _called(split.client, analysis, analysis.inputs.leaves), shapes=True)
    except Exception as error:
        if _WRITES_INTO_PLACEHOLDER in str(error):
            raise


def _other_inputs(analysis: Analysis) -> Iterator[tuple[Any, ...]]:
    """Other raw inputs, if the model's code reads values that depend on them into Python.

    It may branch on them behind the cut too, where it sees placeholders. The example may be all zeros, which lead to
    the same branch as placeholders do.
    """
    crossings = analysis.crossings[0]
    if analysis.on_meta or not any(
        node.into_python and any(map(crossings.from_raw, node.reads)) for node in crossings.trace.nodes
    ):
        return
    draw = torch.Generator().manual_seed(0)

    def changed(leaf: Tensor, sign: int) -> Tensor:
        if leaf.is_floating_point():
            return leaf + sign * torch.rand(leaf.shape, generator=draw).to(leaf)
        return leaf if leaf.dtype == torch.bool else torch.randint(2, leaf.shape, generator=draw).to(leaf)

    named = list(zip(analysis.inputs.names, analysis.inputs.leaves, strict=True))
    for sign in (1, -1):
        raw = {name for name, leaf in named if name in analysis.inputs.raw and isinstance(leaf, Tensor)}
        yield tuple(changed(leaf, sign) if name in raw else leaf for name, leaf in named)


def _compare_on(analysis: Analysis, split: Split, leaves: tuple[Any, ...]) -> None:
    try:
        expected = _called(analysis.model, analysis, leaves)
    except Exception:  # the model itself takes no such input
        return
    try:
        _compare(expected, _later_parts(split, _called(split.client, analysis, leaves), shapes=True), split.plan)
    except SplitError as error:
        raise SplitError(
            f"the model cannot be cut at {_cuts(split.plan)}: its code behind the cut depends on values of the raw "
            "input that it has read before it, and raw inputs never cross"
        ) from error


def _with_example_sizes(analysis: Analysis, split: Split) -> Split:
    """The example's sizes will do for those that the tensors do not tell, if on other sizes they prove irrelevant."""
    shortened = analysis.inputs.shortened()
    if shortened is None:
        return split
    guessed = Split(analysis.model, split.plan.with_example_sizes())
    guessed.example = split.example
    with _trial(analysis, guessed):
        try:
            boundary = _called(guessed.client, analysis, shortened)
            _compare(
                _later_parts(guessed, boundary, shapes=True), _later_parts(guessed, boundary, shapes=False), split.plan
            )
        except Exception:
            return split
    return guessed


@contextmanager
def _trial(analysis: Analysis, split: Split) -> Iterator[None]:
    """Evaluation mode, no gradients; afterwards modes, buffers and random generators are as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in analysis.model.buffers()]
    tried = (analysis.model, *split.parts)
    modes = [[module.training for module in part.modules()] for part in tried]
    for part in tried:
        part.eval()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it rounds otherwise than what training computes
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=analysis.cuda_devices):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for part, training in zip(tried, modes, strict=True):
            part.train(training[0])
            for module, mode in zip(part.modules(), training, strict=True):
                module.training = mode
        for buffer, before in buffers:
            if not _same_bits(buffer, before):
                buffer.copy_(before)


def _called(module: nn.Module, analysis: Analysis, leaves: tuple[Any, ...]) -> Any:
    """On copies of the inputs, for models that change them in place."""
    copies = (leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    args, kwargs = analysis.inputs.arguments(copies)
    return module(*args, **kwargs)


def _later_parts(split: Split, boundary: Boundary, shapes: bool) -> Any:
    """The model's output from the first boundary on, with the shapes that came with it or with the tensors alone."""
    output: Any = boundary
    for part in split.parts[1:]:
        try:
            output = part(output if shapes else output.tensors)
        except Exception as error:
            if isinstance(error, SplitError) or _WRITES_INTO_PLACEHOLDER in str(error):
                raise
            cuts = _cuts(split.plan)
            raise SplitError(f"the model cannot be cut at {cuts}: its code fails behind the cut ({error})") from error
    return output


def _compare(expected: Any, output: Any, plan: SplitPlan) -> None:
    leaves = dict(pytree.tree_leaves_with_path(output))
    for path, whole in pytree.tree_leaves_with_path(expected):
        if isinstance(whole, Tensor) and not _same_bits(whole, leaves.get(path)):
            crossing = ", ".join(tensor.name for cut in plan.cuts for tensor in cut.tensors)
            raise SplitError(
                f"the model cannot be cut at {_cuts(plan)}: something besides {crossing} crosses it, for the output"
                f"{pytree.keystr(path)} is not the whole model's"
            )


def _same_bits(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _cuts(plan: SplitPlan) -> str:
    return " and ".join(f"'{cut.cut}'" for cut in plan.cuts)

"""One training step of the whole model, operation by operation: FLOPs and memory.

After every operation the bytes of all tensors alive are known, and from them the peak of any part: what a client holds
at the cut is what is alive when the forward pass gets there; what it holds in its backward pass is what is alive from
the moment when the gradient of the cut arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from fsl_sage.models.flops import FlopCounter
from fsl_sage.split.plan.analysis import Analysis
from fsl_sage.split.trace.skeleton import Original, skeleton, tensor_leaves, without_data


@dataclass
class Kept:
    """Memory that autograd keeps."""

    bytes: int
    first: int
    """How often autograd had kept anything before."""
    last: int
    """The same, when it was kept for the last time."""


@dataclass
class Step:
    """A training step as a list of operations."""

    flops: list[int] = field(default_factory=list)
    """Of each operation."""
    alive: list[int] = field(default_factory=list)
    """The bytes of all tensors that the step has made and not freed, after each operation."""
    returned: dict[str, int] = field(default_factory=dict)
    """For each module, the number of operations before it returned."""
    gradient_came: dict[str, int] = field(default_factory=dict)
    """For each module, the number of operations before the gradient of its output was known."""
    loss_at: int = 0
    """The number of operations before the backward pass."""
    kept: dict[int, Kept] = field(default_factory=dict)
    """By storage, what autograd keeps for the backward pass; parameters and buffers are left out."""
    kept_before: dict[str, int] = field(default_factory=dict)
    """For each module, how often autograd had kept anything before it returned."""
    times_kept: int = 0
    joint: set[int] = field(default_factory=set)
    """The operations that compute gradients of inputs and of weights at once: convolutions."""

    def client_flops(self, cut: str) -> int:
        """Of the forward and the backward pass before the cut."""
        return sum(self.flops[: self.returned[cut]]) + sum(self.flops[self._gradient_at(cut) :])

    def client_peak(self, cut: str, server_gradients: int) -> int:
        """The most bytes alive in the passes before the cut; the gradients of the server's parameters do not count."""
        forward = self.alive[: self.returned[cut]]
        backward = [alive - server_gradients for alive in self.alive[self._gradient_at(cut) :]]
        return max([0, *forward, *backward])

    def server_flops(self, cut: str, *, cut_gradient: bool = True) -> int:
        """Of what is behind the cut; without the gradient of the cut, its layer's gradient of the input is left out."""
        behind = sum(self.flops) - self.client_flops(cut)
        if cut_gradient or cut not in self.gradient_came:
            return behind
        last = next((place for place in reversed(range(self._gradient_at(cut))) if self.flops[place]), 0)
        return behind - self.flops[last] // (2 if last in self.joint else 1)

    def client_kept(self, cut: str) -> int:
        """Bytes that autograd keeps for what is before the cut."""
        return sum(each.bytes for each in self.kept.values() if each.first < self.kept_before[cut])

    def server_kept(self, cut: str) -> int:
        """Bytes that autograd keeps for what is behind the cut."""
        return sum(each.bytes for each in self.kept.values() if each.last >= self.kept_before[cut])

    def all_kept(self) -> int:
        """Bytes that autograd keeps for both; what both sides keep counts once."""
        return sum(each.bytes for each in self.kept.values())

    def most_alive(self, cut: str) -> tuple[int, int]:
        """The most bytes alive in the forward pass, before the cut and behind it."""
        before, behind = self.alive[: self.returned[cut]], self.alive[self.returned[cut] : self.loss_at]
        return max(before, default=0), max(behind, default=0)

    def _gradient_at(self, cut: str) -> int:
        """The end of the step where no gradient reaches the cut: what comes before it is frozen."""
        return self.gradient_came.get(cut, len(self.flops))


class _Meter(FlopCounter):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of every operation and the bytes of the tensors that are alive after it."""

    def __init__(self, step: Step, weights: list[Tensor], inputs: list[Tensor]) -> None:
        super().__init__()
        self.step = step
        self.bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}
        for tensor in (*weights, *inputs):
            self._watch(tensor, counts=False)

    def note(self, flops: int, operation: Any, result: Any) -> None:
        """One operation more."""
        for tensor in tensor_leaves(result):
            self._watch(tensor)
        if flops and "convolution" in str(operation):
            self.step.joint.add(len(self.step.flops))
        self.step.flops.append(flops)
        self.step.alive.append(self.bytes)

    def keep(self, tensor: Tensor) -> Tensor:
        """Autograd keeps a tensor."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._weights:
            now = self.step.times_kept
            first = self.step.kept[key].first if key in self.step.kept else now
            self.step.kept[key] = Kept(storage.nbytes(), first, now)
        self.step.times_kept += 1
        return tensor

    def _watch(self, tensor: Tensor, counts: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = storage.nbytes() if counts else 0
        self.bytes += size

        def freed(_: Any) -> None:
            self.bytes -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, freed)


class _Mark:
    """Stands as `forward` of a module: notes when it returns, and when the gradient of what it returned comes back."""

    def __init__(self, module: nn.Module, name: str, step: Step) -> None:
        self.original = Original(module)
        self.name = name
        self.step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.original(*args, **kwargs)
        self.step.returned[self.name] = len(self.step.flops)
        self.step.kept_before[self.name] = self.step.times_kept
        for tensor in tensor_leaves(output)[:1]:
            if tensor.requires_grad:
                tensor.register_hook(self._gradient)  # type: ignore[no-untyped-call]
        return output

    def _gradient(self, gradient: Tensor) -> None:
        self.step.gradient_came[self.name] = len(self.step.flops)


Prepare = Callable[[nn.Module], None]
"""Changes a copy of a model before its step."""

Loss = Callable[[Any], Tensor]
"""A scalar of a model's output."""


def training_step(
    analysis: Analysis, prepare: Prepare | None = None, loss: Loss | None = None, *, graph: bool = True
) -> Step:
    """One forward and backward pass in training mode; without a graph, a forward pass alone.

    The step of a large model is not computed, unless its code looks at values.

    Args:
        analysis: The model and its inputs.
        prepare: Changes a copy of the model before.
        loss: Of the outputs; their mean, if it is not given.
        graph: Whether autograd records the forward pass.
    """
    if analysis.is_large:
        try:
            # Tensors that have no data but a device, by which operations choose how they compute.
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            return _taken(analysis, lambda tensor: without_data(fake, tensor), fake, prepare, loss, graph=graph)
        except Exception:
            if analysis.on_meta:
                raise
    with torch.random.fork_rng(devices=analysis.cuda_devices):
        return _taken(analysis, _own, nullcontext(), prepare, loss, graph=graph)


def _taken(
    analysis: Analysis,
    tensor: Callable[[Tensor], Tensor],
    context: AbstractContextManager[Any],
    prepare: Prepare | None,
    loss: Loss | None,
    *,
    graph: bool,
) -> Step:
    model = skeleton(analysis.model, tensor)
    if not model.training:
        model.train()
    step = Step()
    for name, module in model.named_modules():
        if name:
            module.__dict__["forward"] = _Mark(module, name, step)
    leaves = [tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in analysis.inputs.leaves]
    args, kwargs = analysis.inputs.arguments(leaves)
    with context:
        if prepare is not None:
            prepare(model)
        meter = _Meter(step, [*model.parameters(), *model.buffers()], tensor_leaves(leaves))
        with torch.set_grad_enabled(graph), meter, saved_tensors_hooks(meter.keep, lambda tensor: tensor):
            value = (loss or _mean)(model(*args, **kwargs))
            step.loss_at = len(step.flops)
            if value.requires_grad:  # else all is frozen, or there is no graph
                value.backward()  # type: ignore[no-untyped-call]
    return step


def _mean(output: Any) -> Tensor:
    terms = [tensor.float().mean() for tensor in tensor_leaves(output) if tensor.requires_grad]
    return sum(terms[1:], start=terms[0])


def _own(tensor: Tensor) -> Tensor:
    """The same data as a parameter of its own, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.clone()

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fsl_sage.split.plan.analysis import Analysis
from fsl_sage.split.trace.skeleton import Original, skeleton, tensor_leaves, without_data


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

    def client_flops(self, cut: str) -> int:
        """Of the forward and the backward pass before the cut."""
        return sum(self.flops[: self.returned[cut]]) + sum(self.flops[self._gradient_at(cut) :])

    def client_peak(self, cut: str, server_gradients: int) -> int:
        """The most bytes alive in the passes before the cut; the gradients of the server's parameters do not count."""
        forward = self.alive[: self.returned[cut]]
        backward = [alive - server_gradients for alive in self.alive[self._gradient_at(cut) :]]
        return max([0, *forward, *backward])

    def _gradient_at(self, cut: str) -> int:
        """The end of the step where no gradient reaches the cut: what comes before it is frozen."""
        return self.gradient_came.get(cut, len(self.flops))


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of every operation and the bytes of the tensors that are alive after it."""

    def __init__(self, step: Step, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = step
        self.bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._watch(tensor, counts=False)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, which takes longer than the step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensor_leaves(result):
            self._watch(tensor)
        count = flop_registry.get(func._overloadpacket)
        self.step.flops.append(count(*args, **(kwargs or {}), out_val=result) if count else 0)
        self.step.alive.append(self.bytes)
        return result

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
        for tensor in tensor_leaves(output)[:1]:
            if tensor.requires_grad:
                tensor.register_hook(self._gradient)  # type: ignore[no-untyped-call]
        return output

    def _gradient(self, gradient: Tensor) -> None:
        self.step.gradient_came[self.name] = len(self.step.flops)


def training_step(analysis: Analysis) -> Step:
    """One forward and backward pass in training mode. The loss is the mean of the outputs.

    The step of a large model is not computed, unless its code looks at values.
    """
    if analysis.is_large:
        try:
            # Tensors that have no data but a device, by which operations choose how they compute.
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            return _taken(analysis, lambda tensor: without_data(fake, tensor), fake)
        except Exception:
            if analysis.on_meta:
                raise
    with torch.random.fork_rng(devices=analysis.cuda_devices):
        return _taken(analysis, _own, nullcontext())


def _taken(analysis: Analysis, tensor: Callable[[Tensor], Tensor], context: AbstractContextManager[Any]) -> Step:
    model = skeleton(analysis.model, tensor)
    if not model.training:
        model.train()
    step = Step()
    for name, module in model.named_modules():
        if name:
            module.__dict__["forward"] = _Mark(module, name, step)
    leaves = [tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in analysis.inputs.leaves]
    args, kwargs = analysis.inputs.arguments(leaves)
    known = [*model.parameters(), *model.buffers(), *tensor_leaves(leaves)]
    with context, torch.enable_grad(), _Meter(step, known):
        outputs = tensor_leaves(model(*args, **kwargs))
        terms = [output.float().mean() for output in outputs if output.requires_grad]
        loss = sum(terms[1:], start=terms[0])
        del outputs, terms
        loss.backward()  # type: ignore[no-untyped-call]
    return step


def _own(tensor: Tensor) -> Tensor:
    """The same data as a parameter of its own, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.clone()

"""What a role needs for one training step: memory and floating-point operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from fsl_sage.models.flops import FlopCounter
from fsl_sage.roles.replica import Replica


@dataclass(frozen=True)
class Footprint:
    """A step of a role."""

    static_bytes: int
    """Weights and buffers, gradients, and what the optimizers remember."""
    working_bytes: int
    """The most that the step needs at any time besides the weights: what autograd keeps for backward passes, and of a
    pass without a graph all that is alive."""
    step_flops: int
    """Floating-point operations: see `fsl_sage.models.flops`."""

    @property
    def memory(self) -> int:
        """Static and working bytes together."""
        return self.static_bytes + self.working_bytes


class Meter:
    """Watches one step of a role. It changes nothing: tensors that autograd keeps are counted, not copied.

    A step may pause while another role works. So whoever runs the role's code runs it within `watching`, on any thread,
    and the role says where the step begins and ends.
    """

    def __init__(self) -> None:
        self.gradient_bytes = 0
        """Bytes of the gradients with which the step's optimizers worked."""
        self.working_bytes = 0
        self._operations = _Operations()
        self._state = "before"
        self._now = 0
        self._counts: dict[int, int] = {}
        """By storage, how often it is needed now: kept by autograd, or alive without a graph."""
        self._alive: dict[int, weakref.ref[Any]] = {}
        """The storages that were made or given without a graph and are not freed."""
        self._static: dict[int, Tensor] = {}
        self._stack: ExitStack | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for this role's code."""
        if self._state == "after":
            yield
            return
        with ExitStack() as stack:
            self._stack = stack
            if self._state == "within":
                self._enter()
            try:
                yield
            finally:
                self._stack = None

    def begin(self, held: Iterable[Tensor]) -> None:
        """Begin the step, if none was begun. The tensors that the role holds do not count as kept by autograd."""
        if self._state == "before" and self._stack is not None:
            self._state = "within"
            self.holds(held)
            self._enter()

    def end(self) -> None:
        """End the step."""
        if self._state == "within":
            self._state = "after"
            self._static = {}
            if self._stack is not None:
                self._stack.close()

    @property
    def is_done(self) -> bool:
        """Whether a step was watched to its end."""
        return self._state == "after"

    @property
    def flops(self) -> int:
        """Floating-point operations of the step so far."""
        return self._operations.flops

    @contextmanager
    def without_graph(self, *inputs: Any) -> Iterator[None]:
        """While a pass runs that records no graph: what it makes counts from then on as long as it is alive.

        Args:
            inputs: Tensors, alone or in mappings and sequences, that the pass needs too.
        """
        if self._state != "within":
            yield
            return
        for tensor in _tensors_in(inputs):
            self._made(tensor)
        before, self._operations.tell = self._operations.tell, self._made
        try:
            yield
        finally:
            self._operations.tell = before

    def holds(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors among those that the role holds."""
        if self._state == "within":
            # The reference keeps the storage alive, so that no other one gets its address.
            self._static |= {_storage(tensor): tensor for tensor in tensors}

    def found_gradients(self, replicas: Iterable[Replica]) -> None:
        """Note the gradients with which the step's optimizers work."""
        if self._state == "within":
            parameters = (parameter for replica in replicas for parameter in replica.parameters().values())
            self.gradient_bytes = sum(weight.grad.nbytes for weight in parameters if weight.grad is not None)

    def _enter(self) -> None:
        assert self._stack is not None
        self._stack.enter_context(self._operations)
        self._stack.enter_context(saved_tensors_hooks(self._kept, _Kept.tensor_of))

    def _kept(self, tensor: Tensor) -> _Kept:
        key = _storage(tensor)
        if key in self._static:
            return _Kept(tensor, None, 0)
        self._need(key, tensor)
        return _Kept(tensor, self, key)

    def _made(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key in self._static or key in self._alive:
            return
        self._need(key, tensor)
        size = tensor.untyped_storage().nbytes()

        def freed(_: Any) -> None:
            del self._alive[key]
            self._let_go(key, size)

        self._alive[key] = weakref.ref(tensor.untyped_storage(), freed)

    def _need(self, key: int, tensor: Tensor) -> None:
        if not self._counts.get(key):
            self._now += tensor.untyped_storage().nbytes()
            self.working_bytes = max(self.working_bytes, self._now)
        self._counts[key] = self._counts.get(key, 0) + 1

    def _let_go(self, key: int, size: int) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self._now -= size


class _Operations(FlopCounter):  # type: ignore[no-untyped-call]
    """Counts operations, and tells what they make where that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[Tensor], None] | None = None

    def note(self, flops: int, operation: Any, result: Any) -> None:
        """One operation more."""
        super().note(flops, operation, result)
        if self.tell is not None:
            for tensor in _tensors_in(result):
                self.tell(tensor)


class _Kept:
    """A tensor that autograd keeps, until the graph is gone or has been used."""

    __slots__ = ("key", "meter", "tensor")

    def __init__(self, tensor: Tensor, meter: Meter | None, key: int) -> None:
        self.tensor = tensor
        self.meter = meter
        self.key = key

    def __del__(self) -> None:
        if self.meter is not None:
            self.meter._let_go(self.key, self.tensor.untyped_storage().nbytes())

    @staticmethod
    def tensor_of(kept: _Kept) -> Tensor:
        """The tensor, for the backward pass."""
        return kept.tensor


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def held_by(replicas: Iterable[Replica]) -> list[Tensor]:
    """The weights and buffers of replicas, and those that stay in their modules; weights that modules share, once."""
    replicas = list(replicas)
    fixed = {
        _memory_of(tensor) if isinstance(tensor, nn.Parameter) else (place, id(tensor)): tensor
        for place, replica in enumerate(replicas)
        for tensor in replica.slots.fixed
    }
    return [*(tensor for replica in replicas for tensor in replica.tensors.values()), *fixed.values()]


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Which memory it is: the same for two parameters that are one tensor; of shapes alone, each has its own."""
    pointer = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    return (pointer, int(tensor.storage_offset())) if pointer else (-1, id(tensor))


def static_bytes(replicas: Iterable[Replica], gradient_bytes: int) -> int:
    """The bytes of replicas, of what their optimizers remember, and of gradients."""
    replicas = list(replicas)
    remembered = [tensor for replica in replicas for tensor in replica.optimizer_state().values()]
    return gradient_bytes + sum(tensor.nbytes for tensor in (*held_by(replicas), *remembered))

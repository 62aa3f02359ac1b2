"""Counting floating-point operations, the same whichever way a layer computes.

Counted are the products of matrices and the convolutions of the forward and the backward pass, by torch's own formulas:
a multiplication and an addition are two. A convolution counts as the direct one, also where `Conv2d` computes it with
fewer products (Winograd's) or without those that meet padded zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

_COUNTING = threading.local()
_DIRECT = "fsl_sage.direct"
"""Under which the nodes of a graph have the convolution that stands for their operations."""


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it the operations of this thread are counted, those of backward passes too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._inside_direct = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, which takes longer than a step

    def __enter__(self) -> FlopCounter:
        self._outer = getattr(_COUNTING, "counter", None)
        _COUNTING.counter = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _COUNTING.counter = self._outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if self._inside_direct:
            flops = 0
        elif (direct := _stands_for(torch._C._current_autograd_node())) is not None:
            flops, direct.backward = direct.backward, 0
        else:
            flops = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
        self.note(flops, func, result)
        return result

    def note(self, flops: int, operation: Any, result: Any) -> None:
        """One operation more."""
        self.flops += flops

    def direct(self, layer: nn.Conv2d, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """compute(x), counted as the direct convolution of a layer."""
        self._inside_direct = True
        try:
            y = compute(x)
        finally:
            self._inside_direct = False
        forward = conv_flop_count(list(x.shape), list(layer.weight.shape), list(y.shape))
        self.note(forward, torch.ops.aten.convolution.default, y)
        if y.requires_grad:
            _mark(y, x, _Direct(forward * (int(x.requires_grad) + int(layer.weight.requires_grad))))
        return y


@dataclass
class _Direct:
    """A convolution that is computed in another way."""

    backward: int
    """The FLOPs of its backward pass that have not been counted yet."""


def as_direct(layer: nn.Conv2d, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """compute(x), another way to compute a convolution, which counts as the direct one if anyone counts."""
    counter: FlopCounter | None = getattr(_COUNTING, "counter", None)
    return compute(x) if counter is None else counter.direct(layer, compute, x)


def _mark(y: Tensor, x: Tensor, direct: _Direct) -> None:
    """Mark the nodes between x and y."""
    waiting, seen = [y.grad_fn], {x.grad_fn, None}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.metadata[_DIRECT] = direct  # type: ignore[index]
            waiting += [before for before, _ in node.next_functions]


def _stands_for(node: Any) -> _Direct | None:
    return None if node is None else node.metadata.get(_DIRECT)

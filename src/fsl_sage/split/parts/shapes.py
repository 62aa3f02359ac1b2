"""The shapes of what crosses, without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fsl_sage.split.trace.skeleton import call_arguments, skeleton, without_data


def boundary_shapes(client: nn.Module, inputs: Any) -> tuple[Tensor, ...]:
    """The boundary tensors for these inputs on the meta device, where the model and the inputs are."""
    args, kwargs = call_arguments(inputs)
    with torch.no_grad():
        try:  # the meta device is the fastest, but not all code runs there
            output = client(*args, **kwargs)
        except Exception:
            output = _without_data(client, args, kwargs)
    tensors = (output,) if isinstance(output, Tensor) else tuple(getattr(output, "tensors", output))
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors)


def _without_data(client: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a pass whose tensors claim to be on the CPU."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    copied = skeleton(client, lambda tensor: without_data(fake, tensor))
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: without_data(fake, tensor), (args, kwargs))
    with fake:
        return copied(*args, **kwargs)

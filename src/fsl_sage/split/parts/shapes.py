"""The shapes of what crosses, without data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fsl_sage.split.trace.skeleton import call_arguments, skeleton, without_data


def boundary_shapes(client: nn.Module, inputs: Any) -> tuple[Tensor, ...]:
    """The boundary tensors for these inputs on the meta device, where the model and the inputs are."""
    output = output_shapes(client, *call_arguments(inputs))
    return (output,) if isinstance(output, Tensor) else tuple(getattr(output, "tensors", output))


@torch.no_grad()
def output_shapes(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a part gives for these arguments, its tensors on the meta device, where the part and they are."""
    # The meta device is the fastest, but not all code runs there, and autocast does nothing there.
    if not torch.is_autocast_enabled("cpu"):
        with suppress(Exception):
            return part(*args, **kwargs)
    try:
        output = _without_data(part, args, kwargs)
    except Exception:
        if not part.training:
            raise
        # In training BatchNorm takes no single sample; the shapes of an evaluation are the same.
        return output_shapes(skeleton(part).eval(), args, kwargs)
    return pytree.tree_map_only(
        Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), output
    )


def _without_data(client: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a pass whose tensors claim to be on the CPU."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    copied = skeleton(client, lambda tensor: without_data(fake, tensor))
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: without_data(fake, tensor), (args, kwargs))
    with fake:
        return copied(*args, **kwargs)

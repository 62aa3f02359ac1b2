"""Tensors cross Ray's object store as arrays: written once, and read where they lie, by every process of a machine.

What is read so is shared and must not be written on: who trains a received tensor copies it first.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import ray.util
import torch
from torch import Tensor

from fsl_sage.wire.message import Message

ALIGNMENT = 64
"""Bytes to which torch aligns its own memory."""

# torch says once in a process that it cannot keep anyone from writing on a read-only array: let it say so to nobody.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"read-only", np.uint8))

Packed = tuple[np.ndarray, torch.dtype, torch.Size, tuple[int, ...]]


def carry_tensors_as_arrays() -> None:
    """From now on this process gives its tensors to Ray as arrays."""
    ray.util.register_serializer(Tensor, serializer=pack, deserializer=unpack)


def pack(tensor: Tensor) -> Packed:
    """The tensor's bytes as they lie in memory, without a copy where they lie together, and how to read them."""
    tensor = tensor.detach().cpu()
    if not _dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape, tensor.stride()


def unpack(packed: Packed) -> Tensor:
    """A tensor on the very bytes of the array."""
    array, dtype, shape, stride = packed
    if not array.size:
        return torch.empty_strided(shape, stride, dtype=dtype)
    tensor = torch.from_numpy(array)
    # The last bits of a matrix product may depend on how its operands are aligned.
    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()
    return tensor.view(dtype).as_strided(shape, stride)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def to_device(value: Any, device: torch.device) -> Any:
    """Messages, and tensors in mappings and sequences, on this device; not copied where they are there already."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Message):
        return replace(value, parts=to_device(value.parts, device), changes=to_device(value.changes, device))
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    if isinstance(value, tuple):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value

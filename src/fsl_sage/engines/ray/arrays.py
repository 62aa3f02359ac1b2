"""Tensors cross Ray's object store as arrays: written once, and read where they lie, by every process of a machine.

Such tensors are shared and must not be changed: copy a received tensor before training it.
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

# torch warns once in a process that it cannot protect a read-only array. Trigger that warning here, unseen.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"read-only", np.uint8))

Packed = tuple[np.ndarray, torch.dtype, torch.Size, tuple[int, ...]]


def carry_tensors_as_arrays() -> None:
    """Let this process give its tensors to Ray as arrays from now on."""
    ray.util.register_serializer(Tensor, serializer=pack, deserializer=unpack)


def pack(tensor: Tensor) -> Packed:
    """The tensor's bytes in their order in memory, copied only if they are not contiguous, and how to read them."""
    tensor = tensor.detach().cpu()
    if not _dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape, tensor.stride()


def unpack(packed: Packed) -> Tensor:
    """A tensor that shares the bytes of the array."""
    array, dtype, shape, stride = packed
    if not array.size:
        return torch.empty_strided(shape, stride, dtype=dtype)
    tensor = torch.from_numpy(array)
    # The last bits of a matrix product may depend on how its operands are aligned.
    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()
    return tensor.view(dtype).as_strided(shape, stride)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def to_device(value: Any, device: torch.device) -> Any:
    """Move messages, and tensors in mappings and sequences, to this device, unless they are there already."""
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

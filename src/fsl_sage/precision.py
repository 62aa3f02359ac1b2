"""The precision in which a run computes, and the wider one in which it sums."""

from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)

NO_FLOAT64 = {"mps"}
"""Kinds of devices that have no float64."""


def dtype_of(precision: str) -> torch.dtype:
    """The type of weights and images for `--precision`; bf16 keeps both in float32 and casts in forward passes."""
    return torch.float64 if precision == "float64" else torch.float32


def with_precision(module: Module, dtype: torch.dtype, device: torch.device | None = None) -> Module:
    """The module with its numbers in this precision, in place, and on this device if one is given.

    Complex numbers stay complex; `module.to(dtype)` would drop their imaginary parts.
    """

    def converted(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else dtype.to_complex() if tensor.is_complex() else tensor.dtype
        return tensor.to(device or tensor.device, kind)

    return module._apply(converted)  # type: ignore[no-untyped-call]


def multiplies_bfloat16() -> bool:
    """Whether this CPU has products of bfloat16 numbers; where it has none, they take longer than those of float32.

    Only of x86 is it known: other processors are taken to have them.
    """
    able = torch.cpu.get_capabilities()
    return able.get("architecture") != "x86_64" or bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or NaN; so it is where there are only shapes."""
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True
    # One pass, and NaN is both the least and the most; `isfinite().all()` takes twenty times as long on a CPU.
    least, most = torch.aminmax(tensor)
    return bool(least.isfinite() & most.isfinite())


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in float64, for sums; in float32 on a device that has no float64."""
    return tensor.to(torch.float32 if tensor.device.type in NO_FLOAT64 else torch.float64)

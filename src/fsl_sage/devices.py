"""The device that a run computes on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fsl_sage.errors import InputError


def pick_device(name: str) -> torch.device:
    """`auto`: a GPU where there is one."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available.get(name.split(":")[0], False):
        have = ", ".join(["auto", *(kind for kind, there in available.items() if there)])
        raise InputError(f"--device {name} is not available here: give one of {have}.")
    try:
        return torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name} is not possible: give auto, cpu, cuda, cuda:N or mps.") from None


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A batch's tensor on a device. A GPU fetches it from memory that stays in place, while the process goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def all_on(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Named tensors on a device. What several names have as one tensor stays one."""
    there = {id(tensor): tensor.to(device) for tensor in tensors.values()}
    return {name: there[id(tensor)] for name, tensor in tensors.items()}

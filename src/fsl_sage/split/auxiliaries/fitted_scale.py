"""The number by which the cut gradients of an auxiliary are multiplied, where its alignment is by direction alone."""

import torch
from torch import Tensor, nn

FITTED_SCALE = "fitted_scale"


def add_fitted_scale(auxiliary: nn.Module) -> None:
    """Give an auxiliary the number 1. It is a buffer, so it travels with the auxiliary and is saved with it."""
    like = next(auxiliary.parameters())
    auxiliary.register_buffer(FITTED_SCALE, torch.ones((), device=like.device, dtype=like.dtype))


def fitted_scale(part: nn.Module) -> Tensor | None:
    """That of an auxiliary; None where there is none."""
    return part._buffers.get(FITTED_SCALE)

"""Images for a batch: flipped and cropped at random, normalised; all on tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

PADDING = 4
"""Pixels of black around an image that is cropped at random."""


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image flipped with probability 1/2 and cropped at random from its zero-padded self; uint8 [B, C, H, W].

    The draws are made on the CPU whatever the device of `x`, so that every device sees the same images.
    """
    count, _, height, width = x.shape
    top, left = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator).to(x.device)
    flipped = torch.randint(0, 2, (count, 1, 1, 1), generator=generator).bool().to(x.device)
    windows = pad(x, (PADDING,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view [B, C, 9, 9, H, W]
    crops = windows[torch.arange(count, device=x.device), :, top, left]  # [B, C, H, W]
    return torch.where(flipped, crops.flip(3), crops)


def normalise(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std per channel: uint8 [B, C, H, W] to float32."""
    centre, scale = (
        torch.tensor(values, dtype=torch.float32, device=x.device).view(-1, 1, 1) for values in (mean, std)
    )
    return x.to(torch.float32).div_(255).sub_(centre).div_(scale)

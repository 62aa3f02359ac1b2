"""From a client's images to a batch for the model: order, augmentation, normalisation, all on tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsl_sage.errors import InputError

PADDING = 4
"""Pixels of black around an image that is cropped at random."""


def batch_sizes(examples: int, batch_size: int) -> list[int]:
    """Sizes of the batches of one epoch; a single left-over sample joins the batch before it, BatchNorm needs two."""
    if batch_size < 2:
        raise InputError(f"a batch size of {batch_size} is too small: BatchNorm needs at least 2")
    if examples < 2:
        raise InputError(f"{examples} images make no batch: there must be at least 2")
    full, rest = divmod(examples, batch_size)
    sizes = [batch_size] * full
    if rest == 1:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


def batch_indices(examples: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """One epoch: a random permutation of 0 … examples - 1, cut into batches of `batch_sizes`."""
    order = torch.randperm(examples, generator=generator)
    return list(order.split_with_sizes(batch_sizes(examples, batch_size)))


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

"""Images for a batch: flipped and cropped at random, normalised; all on tensors."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsl_sage.errors import InputError
from fsl_sage.own_modules import import_own

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""From images [B, C, H, W] to as many, of the same type, by random numbers of the generator alone."""

PADDING = 4
"""Pixels of black around an image that is cropped at random."""


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image flipped with probability 1/2 and cropped at random from its zero-padded self, [B, C, H, W].

    The draws are made on the CPU whatever the device of `x`, so that every device sees the same images.
    """
    count, _, height, width = x.shape
    top, left = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator).to(x.device)
    flipped = torch.randint(0, 2, (count, 1, 1, 1), generator=generator).bool().to(x.device)
    windows = pad(x, (PADDING,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view [B, C, 9, 9, H, W]
    crops = windows[torch.arange(count, device=x.device), :, top, left]  # [B, C, H, W]
    return torch.where(flipped, crops.flip(3), crops)


def normalise(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std per channel, [B, C, H, W] to float32; of uint8 images (x / 255 - mean) / std."""
    centre, scale = (
        torch.tensor(values, dtype=torch.float32, device=x.device).view(-1, 1, 1) for values in (mean, std)
    )
    x = x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x.clone()
    return x.sub_(centre).div_(scale)


def own_augmentation(name: str) -> Augment:
    """The function that --data.augmentation MODULE:FUNCTION names."""
    function = import_own(name, "--data.augmentation")
    if not callable(function):
        raise InputError(f"--data.augmentation {name} is not a function of images and a torch.Generator.")
    return partial(_checked, function, name)


def _checked(function: Augment, name: str, x: Tensor, generator: torch.Generator) -> Tensor:
    made = function(x, generator)
    if not isinstance(made, Tensor) or made.shape != x.shape or made.dtype != x.dtype:
        got = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise InputError(f"--data.augmentation {name} made {got} of {x.dtype} {list(x.shape)}: both must be the same.")
    return made

"""Images for a batch: flipped and cropped at random, normalised; all on tensors."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsl_sage.errors import InputError, described
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


def own_augmentation(name: str, images: Tensor) -> Augment:
    """The function that --data.augmentation MODULE:FUNCTION names.

    Args:
        name: MODULE:FUNCTION.
        images: A few, [B, C, H, W], on which it is tried at once, so that nothing is trained if it fails; none, or
            only their shape, where the images are elsewhere.
    """
    function = import_own(name, "--data.augmentation")
    if not callable(function):
        raise InputError(f"--data.augmentation {name} is not a function of images and a torch.Generator.")
    checked = partial(_checked, function, name)
    if len(images) and not images.is_meta:
        _try(checked, name, images)
    return checked


def _try(function: Augment, name: str, images: Tensor) -> None:
    """Refuse a function that raises, or that draws random numbers from elsewhere, so that no run could be repeated."""
    try:
        with torch.random.fork_rng(devices=[]):
            made = [function(images.clone(), torch.Generator().manual_seed(0)) for _ in range(2)]
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"--data.augmentation {name} fails on images {list(images.shape)} and a torch.Generator: {described(error)}"
        ) from error
    if not torch.equal(*made):
        raise InputError(
            f"--data.augmentation {name} makes other images of the same ones with the same torch.Generator: draw all "
            "random numbers from the generator that it is given."
        )


def _checked(function: Augment, name: str, x: Tensor, generator: torch.Generator) -> Tensor:
    made = function(x, generator)
    if not isinstance(made, Tensor) or made.shape != x.shape or made.dtype != x.dtype:
        got = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise InputError(f"--data.augmentation {name} made {got} of {x.dtype} {list(x.shape)}: both must be the same.")
    return made

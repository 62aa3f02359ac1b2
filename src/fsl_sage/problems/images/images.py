"""Images in memory: one tensor for a whole set, and what a set says about itself."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsl_sage.errors import InputError
from fsl_sage.problems.images.augment import normalise

LARGEST_IMAGE = 2**24
"""Pixels of an image that a run directory may speak of: a model would take as much memory for more, if told so."""


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images: `x` uint8 or float32 [N, C, H, W], `y` int64 [N]."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype not in (torch.uint8, torch.float32) or self.x.dim() != 4:
            raise InputError(f"images are uint8 or float32 [N, C, H, W], not {self.x.dtype} {list(self.x.shape)}")
        if self.y.dtype != torch.int64 or self.y.dim() != 1:
            raise InputError(f"labels are int64 [N], not {self.y.dtype} {list(self.y.shape)}")
        if len(self.x) != len(self.y):
            raise InputError(f"{len(self.x)} images came with {len(self.y)} labels: there must be one for each")

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> "Images":
        """The same images on another device."""
        return Images(self.x.to(device), self.y.to(device))

    def subset(self, indices: Tensor | np.ndarray | Sequence[int]) -> "Images":
        """The images at `indices`, in that order (a copy)."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.x.device)
        return Images(self.x[chosen], self.y[chosen])


@dataclass(frozen=True)
class Sizes:
    """The sizes of a set: all that the cost of a run needs to know of its data."""

    train: int
    test: int
    classes: int
    image: tuple[int, int, int]
    """Channels, height, width."""
    shares: tuple[int, ...] = ()
    """For each client the number of its training images, where the data say which client has which."""

    def example(self, batch: int, device: torch.device | str) -> Tensor:
        """Inputs of a model, to see what it does."""
        return torch.zeros(batch, *self.image, device=device)

    largest_example = example


@dataclass(frozen=True)
class ImageTerms:
    """What all holders of images must agree on."""

    image: tuple[int, ...] = ()
    """Channels, height and width of an image."""
    classes: tuple[str, ...] = ()
    """The names of the classes in the order of their labels."""
    mean: tuple[float, ...] = ()
    """Mean of x/255 by channel, subtracted from every image."""
    std: tuple[float, ...] = ()
    """Standard deviation of x/255 by channel, by which every image is divided."""
    pixels: str = "uint8"
    """The type of the images: uint8, or float32, whose mean and standard deviation are those of x itself."""

    def sizes(self, train: int, test: int = 0) -> Sizes:
        """The sizes of so many images."""
        channels, height, width = self.image
        return Sizes(train, test, len(self.classes), (channels, height, width))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ImageTerms | None":
        """From plain values, as a run directory has them; None where they are not about images."""
        if "mean" not in values:
            return None
        try:
            named = {name: tuple(values[name]) for name in ("image", "classes", "mean", "std")}
            terms = cls(**named, pixels=str(values.get("pixels", "uint8")))
            possible = terms._possible()
        except (KeyError, TypeError, ValueError):
            possible = False
        if not possible:
            raise InputError("what the run's inference.json says of its images is damaged: put it back as it was.")
        return terms

    def _possible(self) -> bool:
        """Whether these can be images, of a size that somebody has trained on."""
        channels, height, width = self.image
        sizes = all(type(size) is int and size > 0 for size in self.image) and height * width <= LARGEST_IMAGE
        names = len(self.classes) > 0 and all(isinstance(name, str) for name in self.classes)
        moments = len(self.mean) == len(self.std) == channels and all(map(math.isfinite, self.mean + self.std))
        return sizes and names and moments and min(self.std) > 0

    def normalise(self, images: Tensor) -> Tensor:
        """From uint8 [B, C, H, W] to what the model takes, float32."""
        return normalise(images, self.mean, self.std)


@dataclass(frozen=True, eq=False)
class ImageData:
    """A training and a test set. `mean` and `std` are those of x, per channel; of uint8 images those of x/255."""

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shares: tuple[Tensor, ...] = ()
    """For each client the numbers of its training images, int64, where the data say which client has which."""

    def __post_init__(self) -> None:
        channels, train, test = len(self.mean), self.train.x.shape[1:], self.test.x.shape[1:]
        if train != test:
            raise InputError(f"training images are {list(train)} but test images {list(test)} in {self.name}")
        if train[0] != channels or len(self.std) != channels:
            raise InputError(f"{self.name} has {train[0]} channels; mean and std need one value for each")
        for kind, y in (("training", self.train.y), ("test", self.test.y)):
            if y.is_meta:  # shapes without data
                continue
            if len(y) == 0:
                raise InputError(f"{self.name} has no {kind} images")
            if int(y.min()) < 0 or int(y.max()) >= len(self.classes):
                raise InputError(
                    f"the {kind} labels of {self.name} go from {int(y.min())} to {int(y.max())}; "
                    f"{len(self.classes)} classes have the labels 0 to {len(self.classes) - 1}"
                )

    @property
    def terms(self) -> ImageTerms:
        """How the images are to be seen."""
        pixels = str(self.train.x.dtype).removeprefix("torch.")
        return ImageTerms(tuple(self.train.x.shape[1:]), self.classes, self.mean, self.std, pixels)

    @property
    def sizes(self) -> Sizes:
        """The sizes of both sets."""
        channels, height, width = self.train.x.shape[1:]
        shares = tuple(len(share) for share in self.shares)
        return Sizes(len(self.train), len(self.test), len(self.classes), (channels, height, width), shares)


KNOWN_SIZES: dict[str, Sizes] = {
    "cifar10-mini": Sizes(5_000, 1_000, 10, (3, 32, 32)),
    "cifar10": Sizes(50_000, 10_000, 10, (3, 32, 32)),
    "cifar100": Sizes(50_000, 10_000, 100, (3, 32, 32)),
    "fashion-mnist": Sizes(60_000, 10_000, 10, (1, 28, 28)),
}
"""The sizes of the built-in sets, known without loading them."""

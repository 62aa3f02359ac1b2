"""Images in memory: one tensor for a whole set, and what a set says about itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsl_sage.errors import InputError


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
        return Images(self.x.to(device), self.y.to(device))

    def subset(self, indices: Tensor | np.ndarray | Sequence[int]) -> "Images":
        """The images at `indices`, in that order (a copy)."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.x.device)
        return Images(self.x[chosen], self.y[chosen])


@dataclass(frozen=True)
class Sizes:
    """How much there is of what: all that the cost of a run needs of its data."""

    train: int
    test: int
    classes: int
    image: tuple[int, int, int]
    """Channels, height, width."""
    shares: tuple[int, ...] = ()
    """For each client the number of its training images, where the data say who has which."""

    def example(self, batch: int, device: torch.device | str) -> Tensor:
        """Inputs of a model, to see what it does."""
        return torch.zeros(batch, *self.image, device=device)

    largest_example = example


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
    """For each client the numbers of its training images, int64, where the data say who has which."""

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
    def sizes(self) -> Sizes:
        channels, height, width = self.train.x.shape[1:]
        shares = tuple(len(share) for share in self.shares)
        return Sizes(len(self.train), len(self.test), len(self.classes), (channels, height, width), shares)


KNOWN_SIZES: dict[str, Sizes] = {
    "cifar10-mini": Sizes(5_000, 1_000, 10, (3, 32, 32)),
    "cifar10": Sizes(50_000, 10_000, 10, (3, 32, 32)),
    "cifar100": Sizes(50_000, 10_000, 100, (3, 32, 32)),
    "fashion-mnist": Sizes(60_000, 10_000, 10, (1, 28, 28)),
}
"""The built-in sets, for who wants their sizes without loading them."""

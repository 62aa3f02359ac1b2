"""Flower's baseline niid_bench, after Li et al., 2022: its model, its augmentation and its Dirichlet partition."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fsl_sage import Config
from fsl_sage.models.conv import Conv2d
from fsl_sage.models.layout import MaxPool2d
from fsl_sage.problems.images.cifar import CIFAR10_MEAN, CIFAR10_STD
from fsl_sage.problems.images.problem import ImageProblem, load_image_data
from fsl_sage.seeding import numpy_generator

PADDING = 4
FEWEST = 10
"""Images that every client has at least."""


class ZeroToOne(nn.Module):
    """Images from 0 to 1, as the baseline has them, of images that were normalised."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to the same."""
        std, mean = (x.new_tensor(values).view(-1, 1, 1) for values in (CIFAR10_STD, CIFAR10_MEAN))
        return x * std + mean


def cnn(classes: int = 10) -> nn.Sequential:
    """Two convolutions with 6 and 16 channels; images [N, 3, 32, 32] to logits [N, classes].

    The layers are this package's, which are faster on a CPU than those of torch.nn and compute the same.
    """
    return nn.Sequential(
        nn.Sequential(ZeroToOne(), Conv2d(3, 6, 5), MaxPool2d(2), nn.ReLU()),  # the same as the pool of the ReLU
        nn.Sequential(Conv2d(6, 16, 5), MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, classes),
    )


def reflected_crops(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image flipped with probability 1/2 and cropped at random from its reflected self, uint8 [B, C, H, W]."""
    count, _, height, width = x.shape
    top, left = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator).to(x.device)
    flipped = torch.randint(0, 2, (count, 1, 1, 1), generator=generator).bool().to(x.device)
    larger = pad(x.float(), (PADDING,) * 4, mode="reflect").to(x.dtype)
    windows = larger.unfold(2, height, 1).unfold(3, width, 1)  # a view [B, C, 9, 9, H, W]
    crops = windows[torch.arange(count, device=x.device), :, top, left]
    return torch.where(flipped, crops.flip(3), crops)


class CIFAR10(ImageProblem):
    """CIFAR-10 with a Dirichlet partition by class, in which clients differ in size."""

    def divide(self, config: Config) -> list[Tensor]:
        """Each class is dealt out in Dirichlet(alpha) shares, drawn again until every client has enough images."""
        if config.data.partition != "dirichlet":
            return super().divide(config)
        rng = numpy_generator(config.seed, "partition")
        labels = self.labels().cpu().numpy()
        while True:
            clients = dealt_by_class(labels, config.clients, config.data.alpha, rng)
            if min(map(len, clients)) >= FEWEST:
                return [torch.from_numpy(np.sort(client)) for client in clients]


def dealt_by_class(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """The images of each client. Who has an equal share of all images already gets none of the classes to come."""
    dealt = [np.empty(0, dtype=np.int64) for _ in range(clients)]
    for label in np.unique(labels):
        shares = rng.dirichlet(np.full(clients, alpha))
        shares[[len(own) >= len(labels) / clients for own in dealt]] = 0
        images = rng.permutation(np.flatnonzero(labels == label))
        bounds = np.rint(np.cumsum(shares / shares.sum())[:-1] * len(images)).astype(int)
        dealt = [np.concatenate(pair) for pair in zip(dealt, np.split(images, bounds), strict=True)]
    return dealt


def cifar10(config: Config) -> CIFAR10:
    """The problem that `--data.name experiments.niid_bench:cifar10` names."""
    return CIFAR10(load_image_data(replace(config, data=replace(config.data, name="cifar10"))))

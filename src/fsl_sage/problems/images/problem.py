"""Images as a problem: which class an image is of."""

from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.models import make_model, usual_cut
from fsl_sage.precision import dtype_of
from fsl_sage.problems.base import Problem, example_shapes
from fsl_sage.problems.classification import class_weights
from fsl_sage.problems.images.augment import Augment, augment, own_augmentation
from fsl_sage.problems.images.classification import Classification
from fsl_sage.problems.images.images import KNOWN_SIZES, ImageData, Images, Sizes
from fsl_sage.problems.images.sources import load_images


class ImageProblem(Problem):
    """Labelled images, and a model that tells the classes apart."""

    def __init__(self, data: ImageData, sizes: Sizes | None = None) -> None:
        self.data = data
        self.classes = data.classes
        self.sizes = sizes or data.sizes

    @property
    def name(self) -> str:
        """As --data.name."""
        return self.data.name

    @property
    def examples(self) -> int:
        """The number of training images."""
        return self.sizes.train

    def labels(self) -> Tensor:
        """The classes of the training images."""
        return self.data.train.y

    @classmethod
    def accepted_partitions(cls, config: Config) -> tuple[str, ...]:
        """A folder can say which client has which image."""
        return (*cls.partitions, "given") if config.data.name.startswith("folder:") else cls.partitions

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse, before anything slow, options that make no sense here."""
        if config.data.augmentation is not None and not config.data.augment:
            raise InputError("--data.augmentation has no effect with --data.no-augment: leave one of them out.")
        super().check(config)

    def divide(self, config: Config) -> list[Tensor]:
        """As --data.partition says; `given` is as the clients' folders have it."""
        if config.data.partition != "given":
            return super().divide(config)
        shares = self.sizes.shares
        if not shares:
            raise InputError(
                f"--data.partition given is not possible: {self.name} has no folders clients/0, clients/1, …"
            )
        if len(shares) != config.clients:
            raise InputError(f"{self.name} has folders of {len(shares)} clients: give --clients {len(shares)}.")
        if min(shares) < 2:
            raise InputError(
                f"Client {shares.index(min(shares))} of {self.name} has {min(shares)} images: two are needed."
            )
        return list(self.data.shares) or example_shapes(shares)

    def make_model(self, config: Config) -> nn.Module:
        """The model that --model.name names."""
        return make_model(config.model.name, self.sizes.classes, self.sizes.image)

    def usual_cut(self, config: Config, model: nn.Module) -> str | None:
        """The built-in models have one."""
        return usual_cut(config.model.name, model)

    def example(self, batch: int, device: torch.device | str) -> Tensor:
        """Black images, float32 [batch, C, H, W]."""
        return self.sizes.example(batch, device)

    def make_task(self, config: Config, device: torch.device) -> Classification:
        """Classification; on the meta device images stay as they are, because augmentation changes no shape."""
        return Classification(
            self.data,
            device,
            augment=self._augment(config) if device.type != "meta" else None,
            label_smoothing=config.optimizer.label_smoothing or 0.0,
            class_weights=class_weights(config.data.class_weights, self.labels(), self.sizes.classes),
            dtype=dtype_of(config.precision),
        )

    def _augment(self, config: Config) -> Augment | None:
        """What is done with training images, if anything."""
        if not config.data.augment:
            return None
        own = config.data.augmentation
        return own_augmentation(own, self.data.train.x[:2]) if own else augment

    def inference(self) -> dict[str, Any]:
        """How images are normalised, their shape, and the names of the classes."""
        return asdict(self.data.terms)


def load_image_problem(config: Config) -> ImageProblem:
    """The images that --data.name names."""
    return ImageProblem(load_image_data(config))


def load_image_data(config: Config) -> ImageData:
    """Both sets, of images."""
    data = config.data
    return load_images(
        data.name,
        data.dir,
        test_fraction=data.test_fraction,
        image_size=data.image_size,
        train_images=data.train_images,
        test_images=data.test_images,
        seed=config.seed,
    )


def known_image_sizes(config: Config) -> Sizes | None:
    """The sizes of a built-in set, without reading it; None for others."""
    data, sizes = config.data, KNOWN_SIZES.get(config.data.name)
    if sizes is None:
        return None
    train = min(data.train_images or sizes.train, sizes.train)
    return Sizes(train, min(data.test_images or sizes.test, sizes.test), sizes.classes, sizes.image)


@lru_cache(maxsize=16)  # the same problem for the same sizes, so that what is made for it can be kept, too
def image_shapes(sizes: Sizes) -> ImageProblem:
    """Images of the right number and shape on the meta device."""
    train, test = (
        Images(
            torch.empty(count, *sizes.image, dtype=torch.uint8, device="meta"),
            torch.empty(count, dtype=torch.int64, device="meta"),
        )
        for count in (sizes.train, sizes.test)
    )
    ones = (1.0,) * sizes.image[0]
    return ImageProblem(ImageData("shapes", train, test, ("",) * sizes.classes, ones, ones), sizes)

"""Image classification: a batch is images and labels, the loss is cross entropy."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsl_sage.devices import moved
from fsl_sage.problems.base import Batch
from fsl_sage.problems.classification import Classes
from fsl_sage.problems.images.augment import Augment, normalise
from fsl_sage.problems.images.images import ImageData

TEST_BATCH = 250  # fixed, so that the test loss has the same bits whatever the number of workers


class Classification(Classes):
    """Images as one tensor, on the device where it fits; augmentation and normalisation are done per batch."""

    def __init__(
        self,
        data: ImageData,
        device: torch.device,
        *,
        augment: Augment | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__(len(data.classes), **options)
        keep = device if _fits(data, device) else torch.device("cpu")
        self.data = replace(data, train=data.train.to(keep), test=data.test.to(keep))
        self.device = device
        self.augment = augment
        self.dtype = dtype

    def training_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Images, floating, [B, C, H, W] and labels int64 [B]."""
        images = self.data.train
        indices = indices.to(images.x.device)
        x = images.x[indices]
        if self.augment is not None:
            x = self.augment(x, generator)
        return self._batch(x, images.y[indices])

    def plain_batch(self, indices: Tensor) -> Batch:
        """The same without augmentation."""
        images = self.data.train
        indices = indices.to(images.x.device)
        return self._batch(images.x[indices], images.y[indices])

    def test_batches(self) -> int:
        """The number of batches of TEST_BATCH images."""
        return -(-len(self.data.test) // TEST_BATCH)

    def test_batch(self, index: int) -> Batch:
        """Test images as they are."""
        chosen = slice(index * TEST_BATCH, (index + 1) * TEST_BATCH)
        return self._batch(self.data.test.x[chosen], self.data.test.y[chosen])

    def _batch(self, x: Tensor, y: Tensor) -> Batch:
        x = normalise(moved(x, self.device), self.data.mean, self.data.std).to(self.dtype)
        return Batch(x, {"labels": moved(y, self.device)})


def _fits(data: ImageData, device: torch.device) -> bool:
    """Whether the images take at most a quarter of what is free on a GPU; elsewhere memory is the host's anyway."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return data.train.x.nbytes + data.test.x.nbytes <= free // 4

"""Image classification: a batch is images and labels, the loss is cross entropy."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsl_sage.problems.base import Batch, Task
from fsl_sage.problems.images.augment import augment, normalise
from fsl_sage.problems.images.images import ImageData

TEST_BATCH = 250  # fixed, so that the test loss has the same bits whatever the number of workers


class Classification(Task):
    """Images as one uint8 tensor, on the device where it fits; flips, crops and normalisation are done per batch."""

    def __init__(
        self,
        data: ImageData,
        device: torch.device,
        *,
        augment: bool = True,
        label_smoothing: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        keep = device if _fits(data, device) else torch.device("cpu")
        self.data = replace(data, train=data.train.to(keep), test=data.test.to(keep))
        self.device = device
        self.augment = augment
        self.label_smoothing = label_smoothing
        self.dtype = dtype

    def training_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Images, floating, [B, C, H, W] and labels int64 [B]."""
        images = self.data.train
        indices = indices.to(images.x.device)
        x = images.x[indices]
        if self.augment:
            x = augment(x, generator)
        return self._batch(x, images.y[indices])

    def test_batches(self) -> int:
        """The number of batches of TEST_BATCH images."""
        return -(-len(self.data.test) // TEST_BATCH)

    def test_batch(self, index: int) -> Batch:
        """Test images as they are."""
        chosen = slice(index * TEST_BATCH, (index + 1) * TEST_BATCH)
        return self._batch(self.data.test.x[chosen], self.data.test.y[chosen])

    def loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """Mean cross entropy, in float32 whatever the precision of the model."""
        return F.cross_entropy(logits_of(output), target["labels"], label_smoothing=self.label_smoothing)

    def terms(self, target: Mapping[str, Tensor]) -> int:
        """One term a sample."""
        return len(target["labels"])

    def score(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, float]:
        """Summed loss, number correct, number of images."""
        labels, logits = target["labels"], logits_of(output)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum").item(),
            "correct": float((logits.argmax(1) == labels).sum().item()),
            "count": float(len(labels)),
        }

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean test loss and the fraction classified correctly."""
        return {"test_accuracy": sums["correct"] / sums["count"], "test_loss": sums["loss"] / sums["count"]}

    def _batch(self, x: Tensor, y: Tensor) -> Batch:
        x = normalise(x.to(self.device), self.data.mean, self.data.std).to(self.dtype)
        return Batch(x, {"labels": y.to(self.device)})


def logits_of(output: Any) -> Tensor:
    """A model's output [B, classes], which Hugging Face models return with other things."""
    logits: Tensor = getattr(output, "logits", output)
    return logits if logits.dtype == torch.float64 else logits.float()


def _fits(data: ImageData, device: torch.device) -> bool:
    """Whether the images take at most a quarter of what is free on a GPU; elsewhere memory is the host's anyway."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return data.train.x.numel() + data.test.x.numel() <= free // 4

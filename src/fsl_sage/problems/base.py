"""What a task decides: what a batch, its target, the loss and the metrics are.

Algorithms, alignment and wire see a target only as named arrays, [B, …] each, and a loss only as a number, so another
task comes in without touching them. Where batches differ in a further dimension (the length of texts), putting zeros at
the end of it, in smashed data and target, must change no loss: so alignment may put uploads together.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """One mini-batch: what the model takes (a tensor or keyword inputs) and what the loss needs beside its output."""

    inputs: Any
    target: dict[str, Tensor]
    examples: Tensor | None = None
    """The indices of the training examples in it, [B]; they never leave the client. None for a test batch."""


class Task(ABC):
    """The examples of all clients together with the meaning of a batch; clients refer to examples by index."""

    device: torch.device
    """Where batches are made."""

    sizes_vary: bool = False
    """Whether batches of as many examples may differ in their shapes."""

    sizes_are_bounds: bool = False
    """Whether the shapes of batches on the meta device are not exact but the largest that can be."""

    @abstractmethod
    def training_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """The training examples at `indices`, augmented by random numbers of `generator` alone."""

    @abstractmethod
    def test_batches(self) -> int:
        """The number of batches of the test set; their boundaries never change."""

    @abstractmethod
    def test_batch(self, index: int) -> Batch:
        """One batch of the test set."""

    def output(self, head: nn.Module, z: Sequence[Tensor], target: Mapping[str, Tensor]) -> Any:
        """What stands behind the cut, run for `loss` or `score`. A task may leave out what they will not look at."""
        return head(*z)

    @abstractmethod
    def loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over the batch's loss terms: what training differentiates."""

    @abstractmethod
    def terms(self, target: Mapping[str, Tensor]) -> int:
        """How many loss terms (samples, or tokens) the mean of `loss` is taken over."""

    @abstractmethod
    def score(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, float]:
        """Sums over a test batch that `summarise` turns into metrics."""

    @abstractmethod
    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The test set's metrics, `test_loss` and `test_accuracy` among them, from the sums of its batches."""

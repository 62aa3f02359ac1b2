"""What a problem and its task decide: the data and the model; what a batch, its target, the loss and the metrics are.

Algorithms, alignment and wire see a target only as named arrays, [B, …] each, and a loss only as a number, so another
task comes in without touching them. Where batches differ in a further dimension (the length of texts), putting zeros at
the end of it, in smashed data and target, must change no loss: so alignment may put uploads together.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.problems.partition import client_sizes, partition
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.seeding import numpy_generator


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

    @property
    def label_values(self) -> int | None:
        """How many values the target's `labels` can have, from 0 up; None where that is not known."""
        return None

    @abstractmethod
    def training_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """The training examples at `indices`, augmented by random numbers of `generator` alone."""

    def plain_batch(self, indices: Tensor) -> Batch:
        """The training examples at `indices` as they are. A task that augments says here what they are without it."""
        return self.training_batch(indices, torch.Generator())

    @abstractmethod
    def test_batches(self) -> int:
        """The number of batches of the test set; their boundaries never change."""

    @abstractmethod
    def test_batch(self, index: int) -> Batch:
        """One batch of the test set."""

    def output(self, behind: nn.Module, z: Sequence[Tensor], target: Mapping[str, Tensor]) -> Any:
        """The output of what stands behind the cut, for `loss` or `score`; a task may leave out what they ignore."""
        return behind(*z)

    @abstractmethod
    def loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over the batch's loss terms: what training differentiates."""

    @abstractmethod
    def terms(self, target: Mapping[str, Tensor]) -> int:
        """How many loss terms (samples, or tokens) the mean of `loss` is taken over."""

    labels_are: str = "the labels"
    """What a target tells of its examples, for those who hold them: what leaves a site with its uploads."""

    def complaint(self, target: Mapping[str, Tensor]) -> str | None:
        """What is wrong with a target that somebody sent, if the loss could fail by it: names and shapes are right."""
        return None

    def shorter(self) -> "Task | None":
        """Where `sizes_vary` and sizes are bounds: the same task with a bound that is one less, if that can be."""
        return None

    @abstractmethod
    def score(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, Any]:
        """Sums over a test batch, numbers or tensors, that `summarise` turns into metrics."""

    @abstractmethod
    def summarise(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The test set's metrics from the sums of its batches: the headline score, and `test_loss` if there is one.

        A metric is a number. One called `test_class_…` is a list with a number, or None, for each class.
        """


class Problem(ABC):
    """What is learnt: the clients' examples, the test set, the model, the task and the headline score.

    Examples are known by their numbers, 0 … examples - 1. A subclass holds the data; what depends on the run comes with
    the configuration. The same methods serve every engine. On the meta device they give shapes, which is all that the
    cost of a run needs.
    """

    score: Score = ACCURACY
    """What runs are judged by; `Task.summarise` must give a metric of this name."""

    classes: tuple[str, ...] = ()
    """The names of the classes in the order of their labels; empty where there are none."""

    partitions: tuple[str, ...] = ("iid", "dirichlet", "shards")
    """The values of --data.partition that make sense here."""

    model_name: str | None = None
    """What the model is called in reports, where it is not the one of --model.name."""

    @property
    def name(self) -> str:
        """What the problem is called in reports."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @classmethod
    def accepted_partitions(cls, config: Config) -> tuple[str, ...]:
        """The values of --data.partition that make sense for the data that the configuration names."""
        return cls.partitions

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse, before anything slow, options that make no sense here."""
        accepted = cls.accepted_partitions(config)
        if config.data.partition not in accepted:
            words = " or ".join([", ".join(accepted[:-1]), accepted[-1]] if len(accepted) > 1 else accepted)
            raise InputError(f"--data.partition {config.data.partition} is not for {config.data.name}: give {words}.")
        cls.score.check_target(config.target_accuracy, "--target-accuracy")

    @property
    @abstractmethod
    def examples(self) -> int:
        """The number of training examples of all clients together."""

    def labels(self) -> Tensor | None:
        """Integers [examples] that a partition goes by; None where there are none. On the meta device: not known."""
        return None

    def divide(self, config: Config) -> list[Tensor]:
        """For each client the numbers of its examples, int64; on the meta device where only how many is known."""
        self.check(config)
        labels = self.labels()
        if labels is None and config.data.partition != "iid":
            raise InputError(
                f"--data.partition {config.data.partition} goes by labels, and {self.name} has none: give iid."
            )
        if labels is not None and labels.is_meta:
            return example_shapes(client_sizes(self.examples, config.clients))
        shares = partition(
            torch.zeros(self.examples).numpy() if labels is None else labels.cpu().numpy(),
            config.clients,
            config.data.partition,
            alpha=config.data.alpha,
            shards_per_client=config.data.shards_per_client,
            rng=numpy_generator(config.seed, "partition"),
        )
        return [torch.as_tensor(indices, dtype=torch.int64) for indices in shares]

    @abstractmethod
    def make_model(self, config: Config) -> nn.Module:
        """The unsplit model with its initial weights. torch is seeded before; its default device is set."""

    def usual_cut(self, config: Config, model: nn.Module) -> str | None:
        """Where the model is cut if --model.cut is not given; None where that must be given."""
        return None

    @abstractmethod
    def example(self, batch: int, device: torch.device | str) -> Any:
        """Inputs of the model, a tensor or keyword inputs, for the splitter to see what it does."""

    def largest_example(self, batch: int, device: torch.device | str) -> Any:
        """Inputs as large as they can be in a run, to see what it needs."""
        return self.example(batch, device)

    @abstractmethod
    def make_task(self, config: Config, device: torch.device) -> Task:
        """What a batch, its target, the loss and the metrics are; batches are made on the device."""

    def inference(self) -> dict[str, Any]:
        """What using a trained model takes beside its weights, as plain values; a run directory keeps it."""
        return {}

    def named(self, config: Config) -> Config:
        """The configuration with the names of this problem and its model, for a problem that no option names."""
        data = replace(config.data, name=self.name)
        return replace(config, data=data, model=replace(config.model, name=self.model_name or config.model.name))


def example_shapes(counts: Iterable[int]) -> list[Tensor]:
    """For each client as many examples, of which nothing else is known."""
    return [torch.empty(count, dtype=torch.int64, device="meta") for count in counts]

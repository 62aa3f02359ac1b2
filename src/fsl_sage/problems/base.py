"""What a problem and its task decide: the data and the model; what a batch, its target, the loss and the metrics are.

Algorithms, alignment and wire see a target only as named arrays, [B, …] each, and a loss only as a number, so another
task comes in without touching them. Where batches differ in a further dimension (the length of texts), putting zeros at
the end of it, in smashed data and target, must change no loss: so alignment may put uploads together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.config import Config, ModelConfig, option
from fsl_sage.errors import InputError
from fsl_sage.problems.partition import client_sizes, partition
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.seeding import numpy_generator


@dataclass(frozen=True)
class Batch:
    """One mini-batch of B examples."""

    inputs: Any
    """What the model takes: a tensor [B, ...], or a dict of keyword inputs."""
    target: dict[str, Tensor]
    """What the loss needs besides the output, by name, [B, ...] each, such as `labels`."""
    examples: Tensor | None = None
    """The numbers of its training examples, int64 [B]; they never leave the client. None for a test batch."""


class Task(ABC):
    """Makes batches of all clients' examples, and says what their loss and score are."""

    device: torch.device
    """Where batches are made."""

    sizes_vary: bool = False
    """Whether batches with the same number of examples may have different shapes, as texts do."""

    sizes_are_bounds: bool = False
    """Whether batches on the meta device have the largest possible shapes instead of the exact ones."""

    term_dimensions: int = 1
    """How many leading dimensions of smashed data count loss terms: 1, samples; 2, [B, L], the positions of texts."""

    @property
    def label_values(self) -> int | None:
        """The number of values that the target's `labels` can have, from 0 up; None if it is not known."""
        return None

    @abstractmethod
    def training_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """A batch of training examples, possibly augmented.

        Args:
            indices: The numbers of the examples, int64 [B].
            generator: The only source of random numbers.
        """

    def plain_batch(self, indices: Tensor) -> Batch:
        """A batch of the training examples `indices`, int64 [B], not augmented. A task that augments overrides it."""
        return self.training_batch(indices, torch.Generator())

    @abstractmethod
    def test_batches(self) -> int:
        """The number of batches of the test set. Their sizes never change."""

    @abstractmethod
    def test_batch(self, index: int) -> Batch:
        """Batch number `index` of the test set."""

    def output(self, behind: nn.Module, z: Sequence[Tensor], target: Mapping[str, Tensor]) -> Any:
        """The output of the part behind the cut, for `loss` or `score`.

        Args:
            behind: The part behind the cut.
            z: What crosses the cut, [B, *cut] each.
            target: The target. A task may skip outputs that the loss ignores.
        """
        return behind(*z)

    def leaves_out(self, samples: int) -> Callable[[nn.Module], None]:
        """What lets a whole model compute as little as `output` asks for, in shapes, of a batch of so many examples."""
        return lambda model: None

    @abstractmethod
    def loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over the batch's loss terms, a scalar: what training differentiates."""

    def loss_once(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """`loss`, with its bits, for one backward pass after which nobody needs the output: it may be overwritten."""
        return self.loss(output, target)

    @abstractmethod
    def terms(self, target: Mapping[str, Tensor]) -> int:
        """The number of loss terms, samples or tokens, over which `loss` takes the mean."""

    labels_are: str = "the labels"
    """What the target reveals about the examples, in words: it leaves a site with its uploads."""

    def complaint(self, target: Mapping[str, Tensor]) -> str | None:
        """What is wrong with the values of a target that a site sent, if the loss could fail by them; else None."""
        return None

    def shorter(self) -> "Task | None":
        """If shapes are bounds: the same task with a bound that is one less, if possible; else None."""
        return None

    @abstractmethod
    def score(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, Any]:
        """Sums over a test batch by name, numbers or tensors. `summarise` makes metrics of them."""

    @abstractmethod
    def summarise(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of the test set from the sums over all its batches: the headline score, and `test_loss` if any.

        A metric is a number. One called `test_class_…` is a list with a number, or None, for each class.
        """


class Problem(ABC):
    """What is learnt: the clients' examples, the test set, the model, the task and the headline score.

    Derive from it for a problem of your own. Examples have numbers, 0 … examples - 1. A subclass holds the data; the
    run's options come with the configuration. Every engine calls the same methods. With the meta device they must give
    shapes, which is all that the cost of a run needs.
    """

    score: Score = ACCURACY
    """The headline score. `Task.summarise` must return a metric of this name."""

    classes: tuple[str, ...] = ()
    """The names of the classes in the order of their labels; empty if there are none."""

    partitions: tuple[str, ...] = ("iid", "dirichlet", "shards")
    """The values of --data.partition that make sense here."""

    has_tokens: bool = False
    """Whether its examples are texts, whose smashed data are [B, tokens, …]."""

    model_name: str | None = None
    """The model's name in reports, if it is not --model.name."""

    @property
    def name(self) -> str:
        """The problem's name in reports."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @classmethod
    def accepted_partitions(cls, config: Config) -> tuple[str, ...]:
        """The values of --data.partition that make sense for the data that the configuration names."""
        return cls.partitions

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise an InputError for options that make no sense here. Nothing slow has happened yet."""
        accepted = cls.accepted_partitions(config)
        if config.data.partition not in accepted:
            words = " or ".join([", ".join(accepted[:-1]), accepted[-1]] if len(accepted) > 1 else accepted)
            raise InputError(f"--data.partition {config.data.partition} is not for {config.data.name}: give {words}.")
        cls.score.check_target(config.target_accuracy, "--target-accuracy")
        for name in ("tokens", "max_tokens"):
            if getattr(config.alignment, name) is not None and not cls.has_tokens:
                raise InputError(
                    f"{option(f'alignment.{name}')} counts the tokens of texts, and {config.data.name} has none: give "
                    "--alignment.samples, and --alignment.steps or --alignment.passes."
                )

    @property
    @abstractmethod
    def examples(self) -> int:
        """The number of training examples of all clients together."""

    def labels(self) -> Tensor | None:
        """The labels by which a partition divides the examples, integers [examples]; None if there are none.

        A tensor on the meta device means that they are not known here.
        """
        return None

    def divide(self, config: Config) -> list[Tensor]:
        """For each client the numbers of its n examples, int64 [n]; on the meta device if only n is known."""
        self.check(config)
        self.score.check_target(config.target_accuracy, "--target-accuracy")
        labels = self.labels()
        if labels is None and config.data.partition != "iid":
            raise InputError(
                f"--data.partition {config.data.partition} goes by labels, and {self.name} has none: give iid."
            )
        if labels is not None and (labels.shape != (self.examples,) or not _are_integers(labels)):
            raise InputError(
                f"The labels of {self.name} are {str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}: a "
                f"partition goes by an integer for each of the {self.examples} training examples."
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
        """The unsplit model with its initial weights. torch is seeded before, and its default device is set."""

    def usual_cut(self, config: Config, model: nn.Module) -> str | None:
        """The cut if --model.cut is not given: the name of the last module at the client. None if it must be given."""
        return None

    @abstractmethod
    def example(self, batch: int, device: torch.device | str) -> Any:
        """Inputs of the model, a tensor [batch, ...] or keyword inputs. The splitter runs the model on them."""

    def largest_example(self, batch: int, device: torch.device | str) -> Any:
        """Inputs of the largest size in a run, from which its memory is planned."""
        return self.example(batch, device)

    @abstractmethod
    def make_task(self, config: Config, device: torch.device) -> Task:
        """The task: batches, loss and metrics. It makes its batches on `device`."""

    def inference(self) -> dict[str, Any]:
        """What a trained model needs besides its weights, as plain values. The run directory keeps it."""
        return {}

    def named(self, config: Config) -> Config:
        """The configuration with the names of this problem and its model."""
        return self.with_its_model(replace(config, data=replace(config.data, name=self.name)))

    def with_its_model(self, config: Config) -> Config:
        """The configuration with the name of the problem's own model, if it has one. Another name is refused."""
        name = self.model_name
        if name is None:
            return config
        if config.model.name not in (name, ModelConfig.name):
            raise InputError(
                f"--model.name {config.model.name} has no effect: {config.data.name} has a model of its own."
            )
        return replace(config, model=replace(config.model, name=name))


def _are_integers(tensor: Tensor) -> bool:
    return tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex())


def example_shapes(counts: Iterable[int]) -> list[Tensor]:
    """For each client a tensor of so many examples on the meta device."""
    return [torch.empty(count, dtype=torch.int64, device="meta") for count in counts]

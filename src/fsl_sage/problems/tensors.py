"""A problem of tensors in memory: regression, several labels at once, segmentation, whatever is not built in."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsl_sage.config import Config
from fsl_sage.devices import moved
from fsl_sage.errors import InputError, described, sentence
from fsl_sage.precision import dtype_of, with_precision
from fsl_sage.problems.base import Batch, Problem, Task
from fsl_sage.problems.score import Score
from fsl_sage.reading import short

MOST_TRIED = 10**8
"""Numbers in a model that is tried on two examples: the trial takes a copy of it."""
TEST_BATCH = 256  # fixed, so that the scores have the same bits whatever the number of workers

Pair = tuple[Tensor, Tensor]
"""Inputs and targets, [N, …] each."""


class TensorProblem(Problem):
    """Tensors, a model, a loss and a score of your own.

    Args:
        train: The inputs and targets of all clients together, [N, …] each; tensors or NumPy arrays.
        test: Those of the test set.
        model: Makes the unsplit model; it takes a batch of inputs. Its name is the model's in reports.
        loss: From the model's output and the targets of a batch to the mean loss over its examples, a scalar.
        metric: From the same to a number for each example, [B]; their mean over the test set is the headline score.
        score: The name of that score, and whether higher is better.
        cut: The last module at the client if --model.cut is not given.
        labels: Integers [N] that a partition goes by; without them only iid is possible.
        classes: Their names, for the table of which client holds how many.

    Derive from `Problem` and `Task` instead where a batch is more than a pair of tensors.
    """

    def __init__(
        self,
        train: tuple[Tensor | np.ndarray, Tensor | np.ndarray],
        test: tuple[Tensor | np.ndarray, Tensor | np.ndarray],
        model: Callable[[], nn.Module],
        loss: Callable[[Any, Tensor], Tensor],
        metric: Callable[[Any, Tensor], Tensor],
        score: Score,
        cut: str | None = None,
        labels: Tensor | np.ndarray | None = None,
        classes: tuple[str, ...] = (),
    ) -> None:
        self.train, self.test = _pair(train, "training"), _pair(test, "test")
        _refuse_other_shapes(self.train[0], self.test[0])
        if isinstance(model, nn.Module) or not callable(model):
            raise InputError(
                f"The model of a TensorProblem is a {type(model).__name__}: give a function or a class that makes it."
            )
        for what, given in (("loss", loss), ("metric", metric)):
            if not callable(given):
                raise InputError(
                    f"The {what} of a TensorProblem is {short(given, 40)}: give a function of the model's output and "
                    "the targets of a batch."
                )
        if not isinstance(score, Score):
            raise InputError(f"The score of a TensorProblem is {short(score)}: give a fsl_sage.Score.")
        if score.name == "test_loss":
            raise InputError(
                "The score of a TensorProblem is called test_loss, as the mean of its loss over the test set: give its "
                "metric another name, such as test_error."
            )
        self.score, self.classes = score, classes
        name = getattr(model, "__name__", "<lambda>")
        self.model_name = "own model" if name == "<lambda>" else name
        self._model, self._loss, self._metric, self._cut = model, loss, metric, cut
        self._labels = None if labels is None else _as_tensor(labels, "labels")

    @classmethod
    def check(cls, config: Config) -> None:
        """As of every problem, but which target makes sense is known when the score is."""
        super().check(replace(config, target_accuracy=None))

    def named(self, config: Config) -> Config:
        """As of every problem. Options that cannot reach the loss are refused: it was made without them."""
        self.refuse_unread(config)
        return super().named(config)

    def refuse_unread(self, config: Config) -> None:
        """Refuse options of the loss: it is the user's own, and was made without the configuration."""
        if (smoothing := config.optimizer.label_smoothing) is not None:
            raise InputError(
                f"--optimizer.label-smoothing {smoothing:g} has no effect: {self.name} has a loss of its own, which is "
                "made without it. A function MODULE:FACTORY that takes `config` may read it."
            )

    @property
    def examples(self) -> int:
        """The number of training examples."""
        return len(self.train[0])

    def labels(self) -> Tensor | None:
        """As they were given."""
        return self._labels

    def make_model(self, config: Config) -> nn.Module:
        """What `model` makes, tried on two test examples."""
        model = self._model()
        if isinstance(model, nn.Module) and torch.get_default_device().type != "meta":
            self._try(model)
        return model

    def _try(self, model: nn.Module) -> None:
        """Refuse a model, a loss or a metric that would fail when the first round is over and evaluated."""
        tensors = [*model.parameters(), *model.buffers()]
        if any(map(is_lazy, tensors)) or sum(tensor.numel() for tensor in tensors) > MOST_TRIED:
            return
        x, y = (_precise(tensor[:2].cpu().clone(), Config()) for tensor in self.test)
        task = TensorTask((), (x, y), self._loss, self._metric, self.score.name, torch.device("cpu"))
        try:
            tried = with_precision(copy.deepcopy(model).eval(), torch.float32)
        except (RuntimeError, TypeError):  # which is refused where the model is cut
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            usual = [len(x), *self.train[0].shape[1:]]
            other = "" if usual == [*x.shape] else f", where the training inputs are {usual}"
            output = _called(f"model fails on test inputs of {list(x.shape)}{other}", lambda: tried(x))
            _called("metric or the loss fails on two test examples", lambda: task.score(output, {"y": y}))

    def usual_cut(self, config: Config, model: nn.Module) -> str | None:
        """As it was given."""
        return self._cut

    def example(self, batch: int, device: torch.device | str) -> Tensor:
        """Zeros of the right shape."""
        x = self.train[0]
        dtype = torch.float32 if x.is_floating_point() else x.dtype  # a model is drawn and cut in float32
        return torch.zeros(batch, *x.shape[1:], dtype=dtype, device=device)

    def make_task(self, config: Config, device: torch.device) -> "TensorTask":
        """The loss and the score, in the run's precision."""
        pairs = [tuple(_precise(tensor, config) for tensor in pair) for pair in (self.train, self.test)]
        return TensorTask(pairs[0], pairs[1], self._loss, self._metric, self.score.name, device)


class TensorTask(Task):
    """A target is the tensor `y`, [B, …]."""

    labels_are = "the target of every example"

    def __init__(
        self,
        train: tuple[Tensor, ...],
        test: tuple[Tensor, ...],
        loss: Callable[[Any, Tensor], Tensor],
        metric: Callable[[Any, Tensor], Tensor],
        name: str,
        device: torch.device,
    ) -> None:
        self.device = device
        self._train, self._test, self._loss, self._metric, self._name = train, test, loss, metric, name

    def training_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """The examples at `indices`, as they are."""
        if self.device.type == "meta":
            x, y = (torch.empty(len(indices), *t.shape[1:], dtype=t.dtype, device="meta") for t in self._train)
            return Batch(x, {"y": y})
        return self._batch(*(tensor[indices] for tensor in self._train))

    def test_batches(self) -> int:
        """The number of batches of TEST_BATCH examples."""
        return -(-len(self._test[0]) // TEST_BATCH)

    def test_batch(self, index: int) -> Batch:
        """Test examples in their order."""
        chosen = slice(index * TEST_BATCH, (index + 1) * TEST_BATCH)
        return self._batch(*(tensor[chosen] for tensor in self._test))

    def loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """As it was given."""
        value = self._loss(output, target["y"])
        if not isinstance(value, Tensor) or value.dim():
            given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"The loss gave {given}: it must give the mean over the batch, a tensor of one number.")
        return value

    def terms(self, target: Mapping[str, Tensor]) -> int:
        """One term an example."""
        return len(target["y"])

    def complaint(self, target: Mapping[str, Tensor]) -> str | None:
        """Whole numbers beyond those of both sets, which a loss that takes them for classes would fail by."""
        y, known = target["y"], [own for _, own in (self._train, self._test) if own.numel() and not own.is_meta]
        if y.is_floating_point() or not y.numel() or not known:
            return None
        least, most = min(0, *(int(own.min()) for own in known)), max(int(own.max()) for own in known)
        return None if least <= int(y.min()) <= int(y.max()) <= most else f"it has targets outside {least} to {most}"

    def score(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, Any]:
        """Sums of the score and of the loss."""
        count = len(target["y"])
        values = self._metric(output, target["y"])
        if not isinstance(values, Tensor) or values.shape != (count,):
            given = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise InputError(
                f"The metric gave {given} for {count} examples: it must give one number each, a tensor [B]."
            )
        loss = self.loss(output, target).item() * count
        return {"score": values.cpu().double().sum().item(), "loss": loss, "count": count}

    def summarise(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Their means over the test set."""
        return {"test_loss": sums["loss"] / sums["count"], self._name: sums["score"] / sums["count"]}

    def _batch(self, x: Tensor, y: Tensor) -> Batch:
        return Batch(moved(x, self.device), {"y": moved(y, self.device)})


def _pair(given: Any, kind: str) -> Pair:
    """Inputs and targets as tensors; refused if they do not belong together or if numbers are missing."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"The {kind} data of a TensorProblem are a {type(given).__name__}: give (inputs, targets).")
    names = ("inputs", "targets")
    x, y = (
        _as_tensor(each, f"{kind} {what}") if isinstance(each, np.ndarray | Tensor) else each
        for what, each in zip(names, given, strict=True)
    )
    for what, tensor in zip(names, (x, y), strict=True):
        if not isinstance(tensor, Tensor) or not tensor.dim():
            raise InputError(
                f"The {kind} {what} of a TensorProblem are a {type(tensor).__name__}: give a tensor or array [N, …]."
            )
        if tensor.is_floating_point() and not tensor.is_meta and not bool(tensor.isfinite().all()):
            raise InputError(f"The {kind} {what} of a TensorProblem have NaN or infinite numbers: replace them first.")
    if len(x) != len(y) or not len(x):
        raise InputError(f"There are {len(x)} {kind} inputs and {len(y)} targets: give one for each.")
    return x, y


def _as_tensor(given: Any, what: str) -> Tensor:
    """Numbers as a tensor without a graph."""
    try:
        tensor = torch.as_tensor(given).detach()
    except (TypeError, ValueError):
        kind = f"an array of {given.dtype}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
        raise InputError(f"The {what} of a TensorProblem are {kind}: give numbers, a tensor or an array.") from None
    if tensor.layout != torch.strided or tensor.is_nested:
        raise InputError(f"The {what} of a TensorProblem are a sparse or nested tensor: give a dense one.")
    return tensor


def _refuse_other_shapes(train: Tensor, test: Tensor) -> None:
    """Refuse test inputs that are no rows of the training inputs' table. Images may have other sizes."""
    same_table = train.ndim > 2 or train.shape[1:] == test.shape[1:]
    if train.ndim != test.ndim or not same_table:
        raise InputError(
            f"The test inputs of a TensorProblem are {list(test.shape)} and the training inputs {list(train.shape)}: "
            "one model takes both, so give them the same shape but for their number."
        )


def _called(fault: str, call: Callable[[], Any]) -> Any:
    """What the user's code gives; what it raises is said."""
    try:
        return call()
    except InputError:
        raise
    except Exception as error:
        raise InputError(sentence(f"The {fault}: {described(error)}")) from error


def _precise(tensor: Tensor, config: Config) -> Tensor:
    return tensor.to(dtype_of(config.precision)) if tensor.is_floating_point() else tensor

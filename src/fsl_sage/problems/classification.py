"""Classification: the loss is cross entropy. There are scores by class too, because clients' data are skewed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsl_sage.errors import InputError
from fsl_sage.problems.base import Task
from fsl_sage.reading import short

BALANCED = "balanced"
"""Class weights that give every class the same weight in the training loss."""


class Classes(Task):
    """What all classification has in common: a target is the `labels`, int64 [B]; the output is logits [B, classes]."""

    labels_are = "the class of every example"

    def __init__(self, classes: int, label_smoothing: float = 0.0, class_weights: Tensor | None = None) -> None:
        self.classes = classes
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights

    @property
    def label_values(self) -> int:
        """A label is a class."""
        return self.classes

    def loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """Mean cross entropy, in float32 whatever the precision of the model."""
        logits, labels = self._logits_of(output), target["labels"]
        if self.class_weights is None:
            return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        # The mean is over samples and not over weights, so that a sample's gradient does not depend on its batch.
        weights = self.class_weights.to(logits)
        total = F.cross_entropy(logits, labels, weights, label_smoothing=self.label_smoothing, reduction="sum")
        return total / len(labels)

    def terms(self, target: Mapping[str, Tensor]) -> int:
        """One term a sample."""
        return len(target["labels"])

    def complaint(self, target: Mapping[str, Tensor]) -> str | None:
        """Labels of classes that do not exist."""
        labels = target["labels"]
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            return f"it has labels outside 0 to {self.classes - 1}"
        return None

    def score(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, Any]:
        """Summed loss, number correct, number of samples; and by class how many are of it, right, and predicted."""
        labels, logits = target["labels"], self._logits_of(output)
        predicted = logits.argmax(1)
        of, right, said = (
            torch.bincount(numbers, minlength=self.classes).cpu().double()
            for numbers in (labels, labels[predicted == labels], predicted)
        )
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum").item(),
            "correct": float((predicted == labels).sum().item()),
            "count": float(len(labels)),
            "by_class": torch.stack([of, right, said]),
        }

    def _logits_of(self, output: Any) -> Tensor:
        logits = logits_of(output)
        if logits.ndim != 2 or logits.shape[1] != self.classes:
            raise InputError(
                f"The model gives {list(logits.shape)} for a batch, where a number for each of {self.classes} classes "
                "is needed: a factory of your own gets their number as its argument `classes`."
            )
        return logits

    def summarise(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The fraction classified correctly, the mean loss, and what `by_class` says."""
        overall = {"test_accuracy": sums["correct"] / sums["count"], "test_loss": sums["loss"] / sums["count"]}
        return {**overall, **by_class(sums["by_class"])}


def by_class(counts: Tensor) -> dict[str, Any]:
    """The macro-F1, and for each class its accuracy and F1.

    Args:
        counts: For each class the samples that are of it, those of them that were recognised, and the samples that
            were taken for it, [3, classes].

    Returns:
        `test_class_accuracy` and `test_class_f1` are lists in the order of the labels. The accuracy of a class is None
        where the test set has none of it, its F1 where it was not predicted either. `test_macro_f1` is the mean F1 of
        the other classes.
    """
    of, right, said = counts.tolist()
    accuracy = [_share(hits, all_of) for hits, all_of in zip(right, of, strict=True)]
    f1 = [_share(2 * hits, all_of + taken) for hits, all_of, taken in zip(right, of, said, strict=True)]
    known = [value for value in f1 if value is not None]
    return {"test_macro_f1": sum(known) / len(known), "test_class_accuracy": accuracy, "test_class_f1": f1}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def logits_of(output: Any) -> Tensor:
    """A model's output [B, classes], at least in float32."""
    logits = raw_logits_of(output)
    return logits if logits.dtype == torch.float64 else logits.float()


def raw_logits_of(output: Any) -> Tensor:
    """A model's output [B, classes], which Hugging Face models return with other things."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        holds = f" with {short(', '.join(map(str, output)), 60)}" if isinstance(output, Mapping) else ""
        raise InputError(
            f"The model gives a {type(output).__name__}{holds} for a batch, where a number for each class is needed: "
            "let it return the logits alone, a tensor [B, classes]."
        )
    return logits


def class_weights(given: str | None, labels: Tensor, classes: int) -> Tensor | None:
    """The weights of --data.class-weights, float64 [classes].

    `balanced` is n / (classes x the examples of the class), so that their mean over the n training examples is 1.
    """
    if given is None or labels.is_meta:
        return None
    if given == BALANCED:
        counts = torch.bincount(labels.cpu(), minlength=classes).double()
        present = counts > 0
        return torch.where(present, len(labels) / (present.sum() * counts.clamp(min=1)), 0.0)
    try:
        weights = [float(word) for word in given.split(",")]
    except ValueError:
        weights = []
    if len(weights) != classes or not all(0 <= weight < float("inf") for weight in weights):
        raise InputError(
            f"--data.class-weights {given} is not possible: give {BALANCED}, or {classes} numbers from 0 up with "
            "commas between them, one for each class."
        )
    return torch.tensor(weights, dtype=torch.float64)


def refuse_unlearnt(train: Tensor, test: Tensor, classes: tuple[str, ...], origin: object) -> None:
    """Refuse test labels that no training example has: nothing can learn them."""
    unlearnt = sorted(set(test.tolist()) - set(train.tolist()))
    if unlearnt:
        label = unlearnt[0]
        name = f" ({classes[label]})" if classes[label] != str(label) else ""
        raise InputError(
            f"The test set of {origin} has the label {label}{name}, and no training example has it: give training "
            "examples of this class, or leave it out."
        )

"""Scores by class, class weights, and labels that nobody can learn."""

import pytest
import torch
from torch.nn import functional as F

from fsl_sage.errors import InputError
from fsl_sage.problems.classification import Classes, by_class, class_weights, refuse_unlearnt

LABELS = torch.tensor([0, 0, 0, 1, 1, 2])
SAID = torch.tensor([0, 0, 1, 1, 4, 1])


class Plain(Classes):
    """Without batches: only the loss and the scores."""

    def training_batch(self, indices, generator):
        raise NotImplementedError

    test_batches = test_batch = training_batch


def summarised(said, labels, classes):
    task = Plain(classes)
    logits = F.one_hot(said, classes).float()
    parts = [task.score(logits[a:b], {"labels": labels[a:b]}) for a, b in ((0, 2), (2, 6))]
    return task.summarise({name: sum(part[name] for part in parts) for name in parts[0]})


def test_every_class_has_its_accuracy_and_f1():
    """Class 0: 2 of 3 right, said twice. Class 1: 1 of 2, said 3 times. 2 never said; 3 nowhere; 4 said wrongly."""
    found = summarised(SAID, LABELS, 5)
    assert found["test_class_accuracy"] == [2 / 3, 1 / 2, 0, None, None]
    assert found["test_class_f1"] == [4 / 5, 2 / 5, 0, None, 0]
    assert found["test_macro_f1"] == pytest.approx((4 / 5 + 2 / 5 + 0 + 0) / 4, abs=1e-15)
    assert found["test_accuracy"] == 3 / 6


def test_all_right_is_one_and_the_order_of_batches_does_not_matter():
    found = summarised(LABELS, LABELS, 3)
    assert found["test_macro_f1"] == found["test_accuracy"] == 1
    assert by_class(torch.tensor([[3.0, 2], [3, 2], [3, 2]])) == by_class(torch.tensor([[3.0, 2], [3, 2], [3, 2]]))


def test_weights_multiply_a_samples_loss_whatever_its_batch():
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)
    task = Plain(3, 0.0, weights)
    single = F.cross_entropy(logits, LABELS, reduction="none") * weights[LABELS]
    assert task.loss(logits, {"labels": LABELS}).item() == pytest.approx(single.mean().item(), rel=1e-14)
    parts = [task.loss(logits[part], {"labels": LABELS[part]}) * len(LABELS[part]) for part in (slice(2), slice(2, 6))]
    assert sum(parts).item() == pytest.approx(single.sum().item(), rel=1e-14)
    assert Plain(3, 0.1, torch.ones(3)).loss(logits, {"labels": LABELS}).item() == pytest.approx(
        Plain(3, 0.1).loss(logits, {"labels": LABELS}).item(), rel=1e-14
    )


def test_balanced_weights_give_every_class_the_same_share():
    weights = class_weights("balanced", LABELS, 4)
    shares = [float(weights[label] * (label == LABELS).sum()) for label in range(4)]
    assert shares == [2, 2, 2, 0]
    assert float(weights[LABELS].mean()) == 1
    assert class_weights("1,2,0.5", LABELS, 3).tolist() == [1, 2, 0.5]
    assert class_weights(None, LABELS, 3) is None


@pytest.mark.parametrize("given", ["1,2", "1,2,x", "1,-2,3", "1,2,inf", "even"])
def test_impossible_weights_are_refused(given):
    with pytest.raises(InputError, match=r"--data\.class-weights .* is not possible: give balanced, or 3 numbers"):
        class_weights(given, LABELS, 3)


def test_a_label_that_only_the_test_set_has_is_named():
    refuse_unlearnt(LABELS, LABELS[:3], ("a", "b", "c"), "mine.npz")
    with pytest.raises(InputError, match=r"The test set of mine\.npz has the label 2 \(c\), and no training example"):
        refuse_unlearnt(LABELS[:5], LABELS, ("a", "b", "c"), "mine.npz")

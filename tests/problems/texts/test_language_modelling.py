"""The loss of a language model: over the tokens that count, and no others."""

import math

import pytest
import torch
from torch.nn import functional as F

from fsl_sage.problems.texts.language_modelling import LanguageModelling
from fsl_sage.problems.texts.texts import TextData, Texts

CPU = torch.device("cpu")
TEXTS = Texts.of([[1, 2], [3], [1]], [[4], [5, 6, 7], [2, 2]], torch.tensor([0, 1, 0]))
DATA = TextData("made up", TEXTS, TEXTS, ("a", "b"), longest=512, vocabulary=9)


def task(**changes: float) -> LanguageModelling:
    return LanguageModelling(DATA, CPU, longest=512, **changes)


def batch_and_logits() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    batch = task().training_batch(torch.tensor([0, 1]), torch.Generator())
    return batch.target, torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0))


def test_the_training_loss_is_the_smoothed_cross_entropy_of_the_tokens_that_count() -> None:
    target, logits = batch_and_logits()
    terms = []
    for row, place in target["mask"].nonzero().tolist():
        log = logits[row, place].log_softmax(0)
        terms.append(-0.9 * log[target["labels"][row, place].long()] - 0.1 * log.mean())
    assert task().terms(target) == len(terms) == 4
    torch.testing.assert_close(task().loss(logits, target), torch.stack(terms).mean())
    assert task(label_smoothing=0.0).loss(logits, target) != task().loss(logits, target)


def test_positions_that_do_not_count_have_no_gradient() -> None:
    target, logits = batch_and_logits()
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(task().loss(logits, target), logits)
    assert gradient[~target["mask"]].eq(0).all()
    assert gradient[target["mask"]].ne(0).all()


def test_the_test_loss_is_not_smoothed() -> None:
    target, logits = batch_and_logits()
    sums = task().score(logits, target)
    labels = target["labels"][target["mask"]].long()
    assert sums["loss"] == pytest.approx(float(F.cross_entropy(logits[target["mask"]], labels, reduction="sum")))
    scores = task().summarise(sums)
    assert scores["test_perplexity"] == pytest.approx(math.exp(scores["test_loss"]))
    assert scores["test_loss"] == pytest.approx(sums["loss"] / 4)
    assert 0 <= scores["test_accuracy"] <= 1
    assert task().summarise({"loss": 1e6, "correct": 0.0, "count": 1.0})["test_perplexity"] == math.inf


def test_every_test_text_is_tested_once() -> None:
    tested = [task().test_batch(index) for index in range(task().test_batches())]
    assert sum(int(batch.target["mask"].sum()) for batch in tested) == 6


def test_shapes_without_data_are_those_of_the_batches_or_their_bound() -> None:
    meta = torch.device("meta")
    indices = torch.tensor([0, 2])
    real = task().training_batch(indices, torch.Generator())
    known = LanguageModelling(DATA, meta, longest=512)
    bound = LanguageModelling(None, meta, longest=512)
    shapes = known.training_batch(indices, torch.Generator())
    assert shapes.inputs["input_ids"].shape == real.inputs["input_ids"].shape
    for name, tensor in real.target.items():
        assert (shapes.target[name].shape, shapes.target[name].dtype) == (tensor.shape, tensor.dtype)
    assert bound.training_batch(indices, torch.Generator()).target["mask"].shape == (2, 511)
    assert bound.sizes_are_bounds
    assert not known.sizes_are_bounds

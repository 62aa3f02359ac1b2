"""Cross entropy in little memory, for logits that nobody needs afterwards.

torch's own takes four tensors of the logits' size at once: the logits, their logarithmic softmax, its gradient, and the
gradient of the logits. With the vocabulary of a language model these are most of what a small client would need. Here
there is one: a few rows at a time, the gradient takes the place of the logits. Every number comes from the operations
that torch uses, row by row, so that loss and gradient have the same bits; and autograd keeps as many bytes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IN_A_PIECE = 2**20
"""Numbers of a few rows, which are computed at a time."""
IGNORED = -100
"""The label of a row that does not count, as in torch."""
_MEAN = 1  # torch's number for this reduction
_SPARE = ("MmBackward0", "AddmmBackward0", "ToCopyBackward0", "IndexBackward0")
"""Operations that make a new tensor and do not need it for their own backward pass."""


def frugal_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """The value of `F.cross_entropy(logits, labels, label_smoothing=...)`, a scalar, for one backward pass.

    That pass cannot be differentiated. It overwrites the logits, or a copy if what made them needs them itself.

    Args:
        logits: [n, classes], on the CPU.
        labels: int64 [n].
        label_smoothing: The share of the target that all classes have together.
    """
    maker = logits.grad_fn
    if maker is not None and maker.name() not in _SPARE:
        logits = logits.clone()
    likelihood, sums = _Rows.apply(logits, labels)  # type: ignore[no-untyped-call]
    if not label_smoothing:
        return likelihood
    ignored = labels == IGNORED
    smooth = (-sums).masked_fill_(ignored, 0.0).sum() / (~ignored).sum()
    return (1 - label_smoothing) * likelihood + smooth * (label_smoothing / logits.shape[1])


class _Rows(torch.autograd.Function):
    """Of the rows' logarithmic softmax [n, classes]: the mean of what stands at the labels, negated; the sums [n]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        places, targets = _places(labels)
        at_label, sums = logits.new_empty(len(logits), 1), logits.new_empty(len(logits))
        for rows, place, one, total in _pieces(logits, places, at_label, sums):
            log_softmax = rows.log_softmax(1)
            one.copy_(log_softmax.gather(1, place))
            total.copy_(log_softmax.sum(1))
        likelihood, counted = torch.ops.aten.nll_loss_forward(at_label, targets, None, _MEAN, IGNORED)
        ctx.save_for_backward(logits, labels, counted)
        return likelihood, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_likelihood: Tensor, of_sums: Tensor) -> tuple[Tensor, None]:
        logits, labels, counted = ctx.saved_tensors
        places, targets = _places(labels)
        of_label = torch.ops.aten.nll_loss_backward(
            of_likelihood, logits.new_empty(len(logits), 1), targets, None, _MEAN, IGNORED, counted
        )
        for rows, place, one, each in _pieces(logits, places, of_label, of_sums[:, None]):
            gradient = each.expand_as(rows).clone().scatter_add_(1, place, one)
            log_softmax = rows.log_softmax(1)
            rows.copy_(torch._log_softmax_backward_data(gradient, log_softmax, 1, rows.dtype))
        return logits, None


def _places(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where a row's label stands, [n, 1], and the label of a row that has this one class alone, [n]."""
    ignored = labels == IGNORED
    return labels.masked_fill(ignored, 0)[:, None], torch.where(ignored, IGNORED, 0)


def _pieces(logits: Tensor, *others: Tensor) -> Iterator[Sequence[Tensor]]:
    """The tensors in pieces of a few rows. None has one row alone, whose sum torch takes in another order."""
    count = max(1, len(logits) // max(2, IN_A_PIECE // logits.shape[1]))
    return zip(*(tensor.tensor_split(count) for tensor in (logits, *others)), strict=True)

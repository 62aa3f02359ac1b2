"""Gradient matching: train an auxiliary so that its cut gradients become the server's (equation 3 of the paper).

The loss is sum_j |z_b-hat_j - z_b_j|^2 over the samples j, divided by sum_j |z_b_j|^2 over the alignment dataset. The
divisor is a constant, so the minimum is the paper's; but neither the batch size nor the reduction of the training loss
changes the value any more, and Adam's epsilon does not swallow gradients that a mean over the batch has made tiny.

With `alignment.loss` "cosine" the loss is sum_i |g_i| (1 - cos(g-hat_i, g_i)) / sum_i |g_i| over the rows i of a batch,
which are its loss terms: samples, for texts tokens. It turns the estimates towards the server's gradients and leaves
their lengths alone. So at the end one number is fitted for all of them, by least squares over the alignment data, and
kept with the auxiliary.

Where the server's cut gradients are all zero (one class only, a dead cut) or not finite (huge activations) there is
nothing to match, and the divisor would spread zeros or NaN: such an alignment is refused.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from fsl_sage.activity import now
from fsl_sage.alignment.dataset import Upload, batches, tokens_in
from fsl_sage.alignment.passes import Passes, Smash
from fsl_sage.config import AlignmentConfig
from fsl_sage.models.attention import twice_differentiable_attention
from fsl_sage.optimizers import make_optimizer
from fsl_sage.precision import all_finite, wide
from fsl_sage.split import fitted_scale


class UnusableError(ValueError):
    """An alignment that would give no usable auxiliary, with the reason."""


def align(
    auxiliary: nn.Module,
    server: nn.Module,
    uploads: Sequence[Upload],
    passes: Passes,
    config: AlignmentConfig,
    generator: torch.Generator,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Train `auxiliary` in place; `server` only computes targets and stays as it is.

    Args:
        auxiliary: The module whose cut gradients become the server's.
        server: The server-side model with the weights of this moment.
        uploads: Smashed data and targets, put together and cut into batches of `config.batch_size`.
        passes: How to get cut gradients.
        config: Steps, learning rate and so on.
        generator: Draws the order of the batches.
        optimizer: That of the auxiliary's parameters; a new one if not given.

    Returns the loss of each step. Raises `UnusableError` where there is nothing to match or the auxiliary diverges.
    """
    parameters = [parameter for parameter in auxiliary.parameters() if parameter.requires_grad]
    with twice_differentiable_attention():
        losses = _align(
            auxiliary,
            server,
            batches(uploads, config.batch_size),
            passes,
            config,
            generator,
            optimizer or alignment_optimizer(config, parameters),
        )
    if not all(map(all_finite, parameters)):
        raise UnusableError("the auxiliary's weights became infinite or NaN")
    return losses


def _align(
    auxiliary: nn.Module,
    server: nn.Module,
    data: Sequence[Upload],
    passes: Passes,
    config: AlignmentConfig,
    generator: torch.Generator,
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    # BatchNorm ties the samples of a batch together: server and auxiliary see the very same batches.
    targets = [_per_sample(passes.cut_gradient(server, *batch)[0], batch, passes) for batch in data]
    scale = _scale(targets, data)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses = []
    order = _order([tokens_in(batch) for batch in data], config, generator)
    if not order:
        raise UnusableError(f"--alignment.max-tokens {config.max_tokens} is less than one batch has")
    for step, index in enumerate(order, 1):
        now(f"aligning, step {step} of {len(order)}")
        if config.loss == "cosine":
            loss = direction_loss(auxiliary, data[index], targets[index], passes)
        else:
            loss = matching_loss(auxiliary, data[index], targets[index], scale, passes)
        # Into .grad that is None, by backward: what autograd.grad gives has other strides than the weights. A weight
        # that does not reach the cut gradient at all (a bias right before a normalisation) gets none.
        torch.autograd.backward(loss, inputs=parameters)
        if config.clip is not None:
            nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    if config.loss == "cosine":
        _fit_scale(auxiliary, data, targets, passes)
    return [float(loss) for loss in losses]


def _scale(targets: Sequence[Smash], data: Sequence[Upload]) -> float:
    """The mean of |z_b|^2 over the samples of the alignment data."""
    scale = float(sum(_square(target) for target in targets)) / sum(len(batch) for batch in data)
    if scale == 0 or not math.isfinite(scale):
        raise UnusableError(f"the server's cut gradients are {'all zero' if scale == 0 else 'not finite'}")
    return scale


def matching_loss(auxiliary: nn.Module, batch: Upload, target: Smash, scale: float, passes: Passes) -> Tensor:
    """The normalised squared distance of the auxiliary's cut gradients from the server's, for one batch."""
    gradients, _ = passes.cut_gradient(auxiliary, *batch, create_graph=True)
    estimate = _per_sample(gradients, batch, passes)
    distance = _square(tuple(e - t for e, t in zip(estimate, target, strict=True)))
    return distance / (scale * len(batch))


def direction_loss(auxiliary: nn.Module, batch: Upload, target: Smash, passes: Passes) -> Tensor:
    """1 - the mean cosine of the auxiliary's cut gradients with the server's by row, weighted by the latter's lengths.

    Rows in which the server's gradient is zero have no direction and no weight. A batch of nothing else has loss 0.
    """
    gradients, _ = passes.cut_gradient(auxiliary, *batch, create_graph=True)
    estimate, truth = (_rows(each, batch, passes) for each in (_per_sample(gradients, batch, passes), target))
    lengths = torch.linalg.vector_norm(truth, dim=1)
    there = lengths > 0
    along = (estimate[there] * truth[there]).sum(1)
    own = torch.linalg.vector_norm(estimate[there], dim=1).clamp_min(torch.finfo(estimate.dtype).tiny)
    return 1 - (along / own).sum() / lengths.sum() if bool(there.any()) else 0 * estimate.sum()


def _rows(gradients: Smash, batch: Upload, passes: Passes) -> Tensor:
    """[rows, all that belongs to one loss term]: a sample, or a token."""
    leading = passes.task.term_dimensions
    return torch.cat([gradient.flatten(0, leading - 1).flatten(1) for gradient in gradients], 1)


def _fit_scale(auxiliary: nn.Module, data: Sequence[Upload], targets: Sequence[Smash], passes: Passes) -> None:
    """The number that brings the estimates nearest to the server's cut gradients: sum <g-hat, g> / sum |g-hat|^2."""
    along = square = 0.0
    for batch, target in zip(data, targets, strict=True):
        gradients, _ = passes.cut_gradient(auxiliary, *batch, create_graph=True)
        estimate = _per_sample(gradients, batch, passes)
        along += sum(float((wide(e.detach()) * wide(t)).sum()) for e, t in zip(estimate, target, strict=True))
        square += sum(float(wide(e.detach()).square().sum()) for e in estimate)
    if square == 0 or not math.isfinite(along / square):
        raise UnusableError(f"the auxiliary's cut gradients are {'all zero' if square == 0 else 'not finite'}")
    scale = fitted_scale(auxiliary)
    assert scale is not None
    scale.fill_(along / square)


def _per_sample(gradients: Smash, batch: Upload, passes: Passes) -> Smash:
    """From gradients of the mean loss to those of each sample's own loss: undo the division by the number of terms."""
    return tuple(_single(gradient) * passes.task.terms(batch.target) for gradient in gradients)


def _square(tensors: Smash) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


def _single(tensor: Tensor) -> Tensor:
    """At least float32: a difference of two nearly equal bfloat16 has no digits left."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _order(sizes: Sequence[int], config: AlignmentConfig, generator: torch.Generator) -> list[int]:
    """Which batch each step takes: whole passes in random order, cut off after the given number of steps.

    Args:
        sizes: The tokens of each batch.
        config: How many steps, passes and tokens there may be.
        generator: Draws the order.
    """
    count = len(sizes)
    steps = count * config.passes if config.passes is not None else config.steps
    steps = steps if config.max_passes is None else min(steps, count * config.max_passes)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return _affordable(order[:steps], sizes, config.max_tokens)


def _affordable(order: list[int], sizes: Sequence[int], most: int | None) -> list[int]:
    """The steps before the first that would go beyond the budget of tokens."""
    spent = list(accumulate(sizes[index] for index in order))
    return order if most is None else order[: bisect_right(spent, most)]


def alignment_optimizer(config: AlignmentConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of an alignment, without weight decay."""
    return make_optimizer(config.optimizer, parameters, lr=config.lr, weight_decay=0.0)

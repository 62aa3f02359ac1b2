"""Gradient matching: train an auxiliary so that its cut gradients become the server's (equation 3 of the paper).

The loss is sum_j |z_b-hat_j - z_b_j|^2 over the samples j, divided by sum_j |z_b_j|^2 over the alignment dataset. The
divisor is a constant, so the minimum is the paper's; but neither the batch size nor the reduction of the training loss
changes the value any more, and Adam's epsilon does not swallow gradients that a mean over the batch has made tiny.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsl_sage.alignment.dataset import Upload, batches
from fsl_sage.alignment.passes import Passes, Smash
from fsl_sage.config import AlignmentConfig
from fsl_sage.models.attention import twice_differentiable_attention


def align(
    auxiliary: nn.Module,
    server: nn.Module,
    uploads: Sequence[Upload],
    passes: Passes,
    config: AlignmentConfig,
    generator: torch.Generator,
) -> list[float]:
    """Train `auxiliary` in place; `server` only computes targets and stays as it is. Returns the loss of each step."""
    with twice_differentiable_attention():
        return _align(auxiliary, server, batches(uploads, config.batch_size), passes, config, generator)


def _align(
    auxiliary: nn.Module,
    server: nn.Module,
    data: Sequence[Upload],
    passes: Passes,
    config: AlignmentConfig,
    generator: torch.Generator,
) -> list[float]:
    # BatchNorm ties the samples of a batch together: server and auxiliary see the very same batches.
    targets = [_per_sample(passes.cut_gradient(server, *batch)[0], batch, passes) for batch in data]
    scale = sum(_square(target) for target in targets) / sum(len(batch) for batch in data)
    parameters = [parameter for parameter in auxiliary.parameters() if parameter.requires_grad]
    optimizer = _optimizer(parameters, config)
    losses = []
    for index in _order(len(data), config, generator):
        loss = matching_loss(auxiliary, data[index], targets[index], scale, passes)
        for parameter, gradient in zip(parameters, _gradients(loss, parameters), strict=True):
            parameter.grad = gradient
        if config.clip is not None:
            nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        losses.append(loss.detach())
    for parameter in parameters:
        parameter.grad = None
    return [float(loss) for loss in losses]


def matching_loss(auxiliary: nn.Module, batch: Upload, target: Smash, scale: Tensor | float, passes: Passes) -> Tensor:
    """The normalised squared distance of the auxiliary's cut gradients from the server's, for one batch."""
    gradients, _ = passes.cut_gradient(auxiliary, *batch, create_graph=True)
    estimate = _per_sample(gradients, batch, passes)
    distance = _square(tuple(e - t for e, t in zip(estimate, target, strict=True)))
    return distance / (scale * len(batch))


def _per_sample(gradients: Smash, batch: Upload, passes: Passes) -> Smash:
    """From gradients of the mean loss to those of each sample's own loss: undo the division by the number of terms."""
    return tuple(gradient * passes.task.terms(batch.target) for gradient in gradients)


def _square(tensors: Smash) -> Tensor:
    return torch.stack(
        [
            tensor.float().square().sum() if tensor.dtype != torch.float64 else tensor.square().sum()
            for tensor in tensors
        ]
    ).sum()


def _gradients(loss: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    # A bias right before a normalisation, or the head's own, may not reach the cut gradient at all.
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def _order(count: int, config: AlignmentConfig, generator: torch.Generator) -> list[int]:
    """Which batch each step takes: whole passes in random order, cut off after the given number of steps."""
    steps = count * config.passes if config.passes is not None else config.steps
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]


def _optimizer(parameters: list[nn.Parameter], config: AlignmentConfig) -> torch.optim.Optimizer:
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return kinds[config.optimizer](parameters, lr=config.lr, weight_decay=0.0, fused=fused)

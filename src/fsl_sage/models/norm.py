"""Normalisation: BatchNorm in the one layout, its statistics, and GroupNorm in its place."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsl_sage.models.layout import in_channels_last
from fsl_sage.models.modes import is_pinned

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_GROUPS = (32, 16, 8, 4, 2, 1)
_CHANNELS_A_GROUP = 8  # at least: a group that is a single value on a 1x1 map would carry nothing


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` in the one layout."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [N, C, H, W] by channel."""
        return in_channels_last(super().forward, input)


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` in the one layout."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [N, C, H, W] by sample and group of channels."""
        return in_channels_last(super().forward, input)


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Put a GroupNorm with the same weights in the place of every BatchNorm; changes `model` and returns it.

    It has as many groups, a power of two up to 32, as divide the channels into eight or more each.
    """
    if isinstance(model, _BatchNorm):
        return _group_norm(model)
    for name, child in model.named_children():
        setattr(model, name, replace_batch_norm(child))
    return model


def _group_norm(batch_norm: _BatchNorm) -> GroupNorm:
    channels = batch_norm.num_features
    groups = next((g for g in _GROUPS if channels % g == 0 and channels >= g * _CHANNELS_A_GROUP), 1)
    group_norm = GroupNorm(groups, channels, eps=batch_norm.eps, affine=batch_norm.affine)
    if batch_norm.affine:
        group_norm.weight, group_norm.bias = batch_norm.weight, batch_norm.bias
    return group_norm.train(batch_norm.training)


def statistics_names(module: nn.Module) -> set[str]:
    """The names in `module.state_dict()` of the running statistics and step counters of all batch norms."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        if isinstance(child, _BatchNorm)
        for name in _STATISTICS
        if getattr(child, name) is not None
    }


def in_training(module: nn.Module) -> nn.Module:
    """The module in training mode. Looks at its own flag alone: at every step, all flags would take time."""
    return module if module.training else module.train()


@contextmanager
def recalibrated(module: nn.Module) -> Iterator[nn.Module]:
    """Forward passes within it estimate the running statistics of all batch norms anew, as the mean over the batches.

    Everything else is as in evaluation. Afterwards modes and momenta are as before; the statistics are the new ones.
    """
    modes = {child: child.training for child in module.modules()}
    momenta = {child: child.momentum for child in modes if isinstance(child, _BatchNorm) and not is_pinned(child)}
    try:
        module.eval()
        for batch_norm in momenta:
            batch_norm.reset_running_stats()
            batch_norm.momentum = None  # the plain mean over the batches
            batch_norm.training = True
        yield module
    finally:
        for child, training in modes.items():
            child.training = training
        for batch_norm, momentum in momenta.items():
            batch_norm.momentum = momentum


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Run `module` as in training but without a trace: dropout off, running statistics unread and untouched.

    BatchNorm normalises with the batch's own statistics. Everything is as before afterwards.
    """
    modes = {child: child.training for child in module.modules()}
    try:
        module.eval()
        for child in modes:
            if isinstance(child, _BatchNorm) and not is_pinned(child):
                child.training = True
        with untouched_statistics(module):
            yield
    finally:
        for child, training in modes.items():
            child.training = training


@contextmanager
def untouched_statistics(module: nn.Module) -> Iterator[None]:
    """Passes in training mode within it leave the running statistics of all batch norms as they are."""
    tracks = {child: child.track_running_stats for child in module.modules() if isinstance(child, _BatchNorm)}
    try:
        for batch_norm in tracks:
            batch_norm.track_running_stats = False
        yield
    finally:
        for batch_norm, track in tracks.items():
            batch_norm.track_running_stats = track


@contextmanager
def without_trace(module: nn.Module) -> Iterator[None]:
    """Passes within it leave all buffers as they are: statistics of batch norms, and what a model has of its own."""
    before = {child: dict(child._buffers) for child in module.modules() if not isinstance(child, _BatchNorm)}
    copies = {id(x): x.clone() for own in before.values() for x in own.values() if x is not None}
    try:
        for child, own in before.items():
            child._buffers.update({key: x if x is None else copies[id(x)] for key, x in own.items()})
        with untouched_statistics(module):
            yield
    finally:
        for child, own in before.items():
            child._buffers.update(own)

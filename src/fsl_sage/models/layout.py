"""One memory layout for every layer: activations and their gradients are stored channels last on a CPU.

It is the faster layout there, and having only one keeps results independent of how tensors arrive. Sums in another
order give other last bits, and PyTorch's kernels choose the order by layout. So each layer whose bits depend on it
brings its input, and the gradient of its output, into this layout first. A model that is cut anywhere, and whose halves
exchange plain tensors, then computes the same bits as the whole.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class _Layers(threading.local):
    are_plain = False


_LAYERS = _Layers()


@contextmanager
def plain_layers() -> Iterator[None]:
    """Within it this thread's layers compute on a CPU as on a GPU, by torch's own operations in the usual layout.

    Where clients are stacked, `torch.vmap` carries these operations; layouts and Functions of one's own it does not.
    """
    before, _LAYERS.are_plain = _LAYERS.are_plain, True
    try:
        yield
    finally:
        _LAYERS.are_plain = before


def is_for_own_layers(x: Tensor) -> bool:
    """Whether layers compute this input in a way of the package's own: images [N, C, H, W] on a CPU."""
    return x.device.type == "cpu" and x.dim() == 4 and not _LAYERS.are_plain


def channels_last(x: Tensor) -> Tensor:
    """The same values [N, C, H, W], stored as [N, H, W, C]; x itself if it is."""
    if x.shape[2] * x.shape[3] == 1:  # both layouts are the same memory: settle the strides, by which kernels choose
        return x.flatten(1).contiguous()[:, :, None, None]
    return x.contiguous(memory_format=torch.channels_last)


def in_channels_last(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """compute(x), with x and the gradient of the result channels last; on a GPU simply compute(x)."""
    if not is_for_own_layers(x):
        return compute(x)
    y = compute(channels_last(x))
    if y.requires_grad:
        y.register_hook(channels_last)  # type: ignore[no-untyped-call]
    return y


class MaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` in the one layout."""

    def forward(self, input: Tensor) -> Tensor:
        """From [N, C, H, W] to the maxima, [N, C, H', W']."""
        return in_channels_last(super().forward, input)


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """`nn.AdaptiveAvgPool2d` in the one layout."""

    def forward(self, input: Tensor) -> Tensor:
        """From [N, C, H, W] to means, [N, C, *output size]."""
        return in_channels_last(super().forward, input)

"""One memory layout for every layer: activations and their gradients are stored channels last on a CPU.

It is the faster layout there, and having only one keeps results independent of how tensors arrive. Sums in another
order give other last bits, and PyTorch's kernels choose the order by layout. So each layer whose bits depend on it
brings its input, and the gradient of its output, into this layout first. A model that is cut anywhere, and whose halves
exchange plain tensors, then computes the same bits as the whole.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def channels_last(x: Tensor) -> Tensor:
    """The same values [N, C, H, W], stored as [N, H, W, C]; x itself if it is."""
    if x.shape[2] * x.shape[3] == 1:  # both layouts are the same memory: settle the strides, by which kernels choose
        return x.flatten(1).contiguous()[:, :, None, None]
    return x.contiguous(memory_format=torch.channels_last)


def in_channels_last(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """compute(x), with x and the gradient of the result channels last; on a GPU simply compute(x)."""
    if x.device.type != "cpu" or x.dim() != 4:
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

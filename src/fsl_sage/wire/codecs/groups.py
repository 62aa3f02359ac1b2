"""Which numbers of an array share a scale, and the order in which they are written."""

import math
from abc import abstractmethod
from typing import Protocol

from torch import Tensor

from fsl_sage.wire.codecs.arrays import Shape

SMALLEST = 16
"""Groups of fewer numbers would cost more for their scales than they save: the array is then one group."""

Cells = tuple[int, int, int]
"""(outer, groups, inner): the shape in which an array is written; what differs in the middle alone shares no scale."""


class Grouping(Protocol):
    """Maps an array to cells [outer, groups, inner], and back."""

    @abstractmethod
    def shape(self, shape: Shape) -> Cells:
        """Of the cells of an array."""

    def cells(self, x: Tensor) -> Tensor:
        """The numbers of an array in the order in which they are written."""
        return x.reshape(self.shape(x.shape))

    def array(self, cells: Tensor, shape: Shape) -> Tensor:
        """The array of these cells."""
        return cells.view(tuple(shape))


class OfSmashed(Grouping):
    """The groups of activations and their gradients.

    For images [B, C, H, W] each channel of the batch is a group, and so is each feature of [B, C]. For texts
    [B, L, D] each token is a group, because a few large features of transformers would spoil a common scale. Images are
    written channels last, which is their layout in memory.
    """

    def shape(self, shape: Shape) -> Cells:
        """Channels, features or tokens."""
        if len(shape) == 3:
            return _large_enough(1, shape[0] * shape[1], shape[2])
        if len(shape) < 2:
            return 1, 1, math.prod(shape)
        return _large_enough(shape[0] * math.prod(shape[2:]), shape[1], 1)

    def cells(self, x: Tensor) -> Tensor:
        """Channels last."""
        return (x if x.dim() < 4 else x.movedim(1, -1)).reshape(self.shape(x.shape))

    def array(self, cells: Tensor, shape: Shape) -> Tensor:
        """The array. If channels were written last, it has that layout in memory again."""
        if len(shape) < 4:
            return super().array(cells, shape)
        return cells.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


class OfWeights(Grouping):
    """Of weights [out, ...]: each output channel; biases and the like [out] are one group."""

    def shape(self, shape: Shape) -> Cells:
        """Output channels."""
        if len(shape) < 2:
            return 1, 1, math.prod(shape)
        return _large_enough(1, shape[0], math.prod(shape[1:]))


def _large_enough(outer: int, groups: int, inner: int) -> Cells:
    return (outer, groups, inner) if outer * inner >= SMALLEST else (1, 1, outer * groups * inner)

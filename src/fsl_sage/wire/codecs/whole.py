"""Numbers as they are: for what is only compressed."""

import math

import torch
from torch import Tensor

from fsl_sage.wire.codecs.arrays import ArrayCodec, Noise, Shape, as_bytes


class Whole(ArrayCodec):
    """Keeps every bit."""

    is_absolute = True

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """As in memory."""
        return math.prod(shape) * dtype.itemsize

    def encode(self, x: Tensor, noise: Noise) -> Tensor:
        """Its bytes."""
        return as_bytes(x)

    def decode(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Exactly what it was."""
        return payload.clone().view(dtype).view(tuple(shape))

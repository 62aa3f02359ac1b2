"""Two bytes a number."""

import math
from typing import Literal

import torch
from torch import Tensor

from fsl_sage.precision import all_finite
from fsl_sage.wire.codecs.arrays import ArrayCodec, CodecError, Noise, Shape
from fsl_sage.wire.codecs.groups import Grouping

WAY_OUT = {
    "float16": "Give bf16, which has the range of float32.",
    "bfloat16": "A lower --optimizer.lr usually helps.",
}


class Cast(ArrayCodec):
    """To float16 or bfloat16 and back."""

    is_absolute = True

    def __init__(self, dtype: Literal["float16", "bfloat16"], grouping: Grouping) -> None:
        self.dtype = getattr(torch, dtype)
        self._grouping = grouping  # here it is only the order in which numbers are written

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """Two bytes for each number."""
        return 2 * math.prod(shape)

    def encode(self, x: Tensor, noise: Noise) -> Tensor:
        """Rounded to the nearest."""
        short = self._grouping.cells(x).to(self.dtype)
        if not all_finite(short):
            name = str(self.dtype).removeprefix("torch.")
            raise CodecError(f"Numbers that are infinite, or become so, cannot be sent as {name}. {WAY_OUT[name]}")
        return short.reshape(-1).view(torch.uint8)

    def decode(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Exactly what was rounded to."""
        numbers = payload.clone().view(self.dtype)
        if not all_finite(numbers):
            raise CodecError("A payload has numbers that are not finite.")
        return self._grouping.array(numbers.to(dtype), shape)

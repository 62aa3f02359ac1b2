"""Two bytes a number."""

import math
from typing import Literal

import torch
from torch import Tensor

from fsl_sage.wire.codecs.arrays import ArrayCodec, CodecError, Noise, Shape

WAYS_OUT = {
    torch.float16: "Give bf16, which has the range of float32.",
    torch.bfloat16: "A lower --optimizer.lr usually helps.",
}


class Cast(ArrayCodec):
    """To float16 or bfloat16 and back."""

    is_absolute = True

    def __init__(self, dtype: Literal["float16", "bfloat16"]) -> None:
        self.dtype = getattr(torch, dtype)

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """Two bytes for each number."""
        return 2 * math.prod(shape)

    def encode(self, x: Tensor, noise: Noise) -> Tensor:
        """Rounded to the nearest."""
        short = x.contiguous().to(self.dtype)
        if not short.isfinite().all():
            name = str(self.dtype).removeprefix("torch.")
            raise CodecError(f"Numbers that are infinite, or become so, cannot be sent as {name}. {self._way_out()}")
        return short.view(-1).view(torch.uint8)

    def _way_out(self) -> str:
        return WAYS_OUT[self.dtype]

    def decode(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Exactly what was rounded to."""
        numbers = payload.clone().view(self.dtype)
        if not numbers.isfinite().all():
            raise CodecError("A payload has numbers that are not finite.")
        return numbers.to(dtype).view(tuple(shape))

"""Labels in the smallest type that holds every class."""

import math

import torch
from torch import Tensor

from fsl_sage.wire.codecs.arrays import ArrayCodec, CodecError, Noise, Shape


class Smallest(ArrayCodec):
    """Whole numbers from 0 to `values` - 1, in one, two or four bytes."""

    def __init__(self, values: int) -> None:
        self.values = values
        self.width = next(width for width in (1, 2, 4, 8) if values <= 2 ** (8 * width) or width == 8)

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """As many bytes for each as the highest needs."""
        return self.width * math.prod(shape)

    def encode(self, x: Tensor, noise: Noise) -> Tensor:
        """The low bytes of each."""
        if int(x.min()) < 0 or int(x.max()) >= self.values:
            raise CodecError(
                f"Labels from {int(x.min())} to {int(x.max())} are not among {self.values} classes: give "
                "--codec.labels none."
            )
        return x.long().view(-1, 1).view(torch.uint8)[:, : self.width].reshape(-1)

    def decode(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Exactly what they were."""
        wide = torch.zeros((math.prod(shape), 8), dtype=torch.uint8, device=payload.device)
        wide[:, : self.width] = payload.view(-1, self.width)
        return wide.view(torch.int64).view(tuple(shape)).to(dtype)

"""A few bits a number: which of the evenly spaced levels between the least and the greatest of its group."""

import math

import torch
from torch import Tensor

from fsl_sage.precision import wide
from fsl_sage.wire.codecs.arrays import ArrayCodec, CodecError, Noise, Shape, as_bytes, of_bytes
from fsl_sage.wire.codecs.groups import Grouping

LARGEST = 2.0**126
"""Beyond it the distance of two numbers may overflow float32."""
SMALLEST = 2.0**-126
"""The smallest distance of two levels: one over a smaller one would overflow float32. It may also be 0."""


class Quantise(ArrayCodec):
    """Uniform levels: x becomes the code (x - zero) / step, and is read as zero + code · step.

    `zero` and `step`, float32, are sent for each group. A code is rounded at random to one of the two next to it, so
    that its mean is x; or to the nearest.
    """

    def __init__(self, bits: int, grouping: Grouping, *, nearest: bool = False) -> None:
        self.bits = bits
        self.nearest = nearest
        self._grouping = grouping

    @property
    def highest(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """Zero and step of each group, and the codes."""
        if not math.prod(shape):
            return 0
        return 8 * self._grouping.shape(shape)[1] + -(-math.prod(shape) * self.bits // 8)

    def encode(self, x: Tensor, noise: Noise) -> Tensor:
        """Zero and step of every group, one behind the other, then the codes."""
        cells = self._grouping.cells(x)
        if cells.dtype not in (torch.float32, torch.float64):
            cells = cells.float()
        zero, step = self._levels(cells)
        scale = torch.where(step > 0, 1 / step.to(cells.dtype), 0)
        codes = cells.sub(zero[:, None]).mul_(scale[:, None]).reshape(-1)
        if self.nearest:
            codes.add_(0.5)
        else:
            words = noise.words(codes.numel()).to(codes.device)
            codes.add_(words, alpha=2.0**-16).add_(0.5 + 2.0**-17)
        return as_bytes(zero, step, pack(codes.clamp_(0, self.highest).to(torch.uint8), self.bits))

    def _levels(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest level of each group and the distance of its levels, float32 [groups]; no number lies outside."""
        low, high = cells.amin((0, 2)), cells.amax((0, 2))
        if not bool((low >= -LARGEST).all() & (high <= LARGEST).all()):
            raise CodecError(
                "Numbers that are infinite, not a number or beyond 8e37 cannot be coded. "
                "A lower --optimizer.lr usually helps."
            )
        zero = low.float()
        zero = torch.where(zero > low, torch.nextafter(zero, zero.new_tensor(-math.inf)), zero)
        span = wide(high) - wide(zero)
        step = (span / self.highest).float()
        step = torch.where(wide(step) * self.highest < span, torch.nextafter(step, step.new_tensor(math.inf)), step)
        return zero, torch.where(step > 0, step.clamp(min=SMALLEST), step)

    def decode(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Zero + code · step. Raises a CodecError for impossible levels."""
        outer, groups, inner = self._grouping.shape(shape)
        zero, step = of_bytes(payload, (groups, torch.float32), (groups, torch.float32))
        if not bool(((zero.abs() <= 2 * LARGEST) & (step >= 0) & (step <= LARGEST)).all()):
            raise CodecError("A payload has levels that cannot be: a scale is negative, too large or no number.")
        number = torch.float64 if dtype == torch.float64 else torch.float32
        codes = unpack(payload[8 * groups :], self.bits, outer * groups * inner).to(number).view(outer, groups, inner)
        return self._grouping.array(codes.mul_(step[:, None]).add_(zero[:, None]).to(dtype), shape)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes, uint8 [n], several to a byte: the first of n / 2 (or n / 4) in the low bits, the next above them."""
    a_byte = 8 // bits
    if a_byte == 1:
        return codes
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % a_byte)).view(a_byte, -1)
    packed = rows[0].clone()
    for place in range(1, a_byte):
        packed |= rows[place] << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes that `pack` was given."""
    a_byte = 8 // bits
    if a_byte == 1:
        return packed
    rows = torch.stack([(packed >> (bits * place)) & (2**bits - 1) for place in range(a_byte)])
    return rows.view(-1)[:count]

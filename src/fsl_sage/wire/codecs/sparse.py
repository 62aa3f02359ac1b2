"""The largest numbers alone, and where they are; the others are read as 0."""

import math

import torch
from torch import Tensor

from fsl_sage.precision import all_finite
from fsl_sage.wire.codecs.arrays import ArrayCodec, CodecError, Noise, Shape, as_bytes

STRAY = 0.1
"""The probability with which a slot of randtopk takes a number that is not among the largest (arXiv 2305.18469)."""


class TopK(ArrayCodec):
    """The share of each row that is largest by its absolute value, exactly; rounded up to a whole number.

    A row is an example of a batch (`by_example`), or the whole array. The numbers go first, in order, then where they
    are: a bit for each place, or four bytes for each number, whichever is shorter; nothing where all are sent. With
    `random` each slot takes one that is not among the largest with probability 0.1: with always the same places sent,
    what stands behind the cut would learn from these alone.
    """

    def __init__(self, share: float, *, by_example: bool, random: bool = False) -> None:
        self.share = share
        self._by_example = by_example
        self._random = random

    def rows(self, shape: Shape) -> tuple[int, int]:
        """(rows, numbers in each)."""
        rows = shape[0] if self._by_example and len(shape) > 1 else 1
        return rows, math.prod(shape) // rows

    def kept(self, shape: Shape) -> int:
        """How many numbers of a row are sent."""
        length = self.rows(shape)[1]
        return min(length, math.ceil(self.share * length - 1e-9))

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """The numbers and where they are."""
        if not math.prod(shape):
            return 0
        numbers = self.rows(shape)[0] * self.kept(shape)
        return numbers * dtype.itemsize + _bytes_of_places(math.prod(shape), numbers)

    def encode(self, x: Tensor, noise: Noise) -> Tensor:
        """The numbers row by row, then where they are."""
        if not all_finite(x):
            raise CodecError("Numbers that are not finite cannot be coded. A lower --optimizer.lr usually helps.")
        rows = x.reshape(self.rows(x.shape))
        places = self._choose(rows, self.kept(x.shape), noise)
        return as_bytes(rows[places], _write_places(places.view(-1), int(places.sum())))

    def _choose(self, rows: Tensor, kept: int, noise: Noise) -> Tensor:
        """Which numbers are sent, bool [rows, length]."""
        largest = rows.abs().topk(kept, dim=1, sorted=False).indices
        if self._random and kept < rows.shape[1]:
            largest = _some_others(largest, rows.shape[1], noise)
        return torch.zeros(rows.shape, dtype=torch.bool, device=rows.device).scatter_(1, largest, True)

    def decode(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The numbers at their places, 0 elsewhere."""
        places = self.places(payload, shape, dtype)
        numbers = payload[: int(places.sum()) * dtype.itemsize].clone().view(dtype)
        return fill(places, numbers).view(tuple(shape))

    def places(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Which numbers a payload has, bool [rows, length]. Raises a CodecError if a row has too few or too many."""
        rows, length = self.rows(shape)
        kept = self.kept(shape)
        places = _read_places(payload[rows * kept * dtype.itemsize :], rows * length, rows * kept).view(rows, length)
        if bool((places.sum(1) != kept).any()):
            raise CodecError(f"A payload says of a row that not {kept:,} of its {length:,} numbers were sent.")
        return places


class AtPlaces:
    """Gradients at the places whose activations were sent. The others are 0."""

    def encode(self, x: Tensor, places: Tensor) -> Tensor:
        """The numbers alone."""
        if not all_finite(x):
            raise CodecError("Gradients that are not finite cannot be coded. A lower --optimizer.lr usually helps.")
        return as_bytes(x.reshape(places.shape)[places])

    def decode(self, payload: Tensor, places: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The numbers at their places, 0 elsewhere."""
        return fill(places, payload.clone().view(dtype)).view(tuple(shape))


def fill(places: Tensor, numbers: Tensor) -> Tensor:
    """Numbers at these places, 0 elsewhere."""
    if not all_finite(numbers):
        raise CodecError("A payload has numbers that are not finite.")
    array = torch.zeros(places.shape, dtype=numbers.dtype, device=numbers.device)
    array[places] = numbers
    return array


def _some_others(largest: Tensor, length: int, noise: Noise) -> Tensor:
    """Replace some of the largest [rows, kept] by others of their row, both drawn uniformly."""
    rows, kept = largest.shape
    draw = noise.generator()
    strays = torch.from_numpy(draw.binomial(kept, STRAY, rows)).clamp(max=length - kept).to(largest.device)
    if not int(strays.max()):
        return largest
    mixed = torch.from_numpy(draw.random((rows, kept), "float32")).to(largest.device).argsort(1)
    lots = torch.from_numpy(draw.random((rows, length), "float32")).to(largest.device).scatter_(1, largest, -1.0)
    others = lots.topk(int(strays.max()), dim=1).indices
    result = largest.gather(1, mixed)
    slots = torch.arange(others.shape[1], device=largest.device)
    result[:, : others.shape[1]] = torch.where(slots < strays[:, None], others, result[:, : others.shape[1]])
    return result


def _bytes_of_places(length: int, numbers: int) -> int:
    return 0 if numbers == length else min(-(-length // 8), 4 * numbers)


def _write_places(places: Tensor, numbers: int) -> Tensor:
    """Write the places of the numbers: a bit for each place, or an index for each number."""
    length = places.numel()
    if numbers == length:
        return torch.empty(0, dtype=torch.uint8, device=places.device)
    if _bytes_of_places(length, numbers) == 4 * numbers:
        return places.nonzero().view(-1).to(torch.int32)
    bits = torch.nn.functional.pad(places.to(torch.uint8), (0, -length % 8)).view(8, -1)
    return sum((bits[place] << place for place in range(1, 8)), bits[0].clone())


def _read_places(written: Tensor, length: int, numbers: int) -> Tensor:
    places = torch.zeros(length, dtype=torch.bool, device=written.device)
    if numbers == length:
        return ~places
    if _bytes_of_places(length, numbers) == 4 * numbers:
        indices = written.clone().view(torch.int32).long()
        if int(indices.min()) < 0 or int(indices.max()) >= length:
            raise CodecError(f"A payload has numbers at places outside its array of {length:,}.")
        places[indices] = True
        return places
    bits = torch.stack([(written >> place) & 1 for place in range(8)])
    return bits.view(-1)[:length].bool()

"""What every array codec does, and the names under which coded arrays travel."""

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fsl_sage.errors import TrainingError
from fsl_sage.seeding import derive
from fsl_sage.wire.message import Tensors

Shape = Sequence[int]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
LARGEST = 2**40
"""No array has more elements: what a name says is checked before memory is taken for it."""


class CodecError(TrainingError):
    """An array cannot be coded, or a payload cannot be decoded."""


class Noise(NamedTuple):
    """The key of the random numbers for one array."""

    seed: int
    purpose: str
    client: int = -1
    round: int = -1
    step: int = -1

    def for_array(self, name: str) -> "Noise":
        """The key for one of several arrays that travel together."""
        return self._replace(purpose=f"{self.purpose}/{name}")

    def generator(self) -> np.random.Generator:
        """A fresh generator, the same for the same key."""
        return np.random.Generator(np.random.SFC64(derive(*self)))

    def words(self, count: int) -> Tensor:
        """Whole numbers from -2^15 to 2^15 - 1, int16 [count]."""
        raw = self.generator().bit_generator.random_raw(-(-count // 4))
        return torch.from_numpy(raw.view(np.int16)[:count])


class ArrayCodec(Protocol):
    """One array to a payload, uint8 [length], and back."""

    is_absolute: bool = False
    """Whether whole weights are coded as well as differences."""
    varies: bool = False
    """Whether the length of a payload depends on the numbers; `size` is then the most that it can be."""

    @abstractmethod
    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """The length of the payload of an array."""

    @abstractmethod
    def encode(self, x: Tensor, noise: Noise) -> Tensor:
        """The payload of an array."""

    @abstractmethod
    def decode(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The array that a receiver reads from a payload."""


def encode_all(
    codec: ArrayCodec, tensors: Mapping[str, Tensor], noise: Noise, coded: Callable[[str, Tensor], bool]
) -> Tensors:
    """Named arrays as they travel: those that are `coded` as payloads, the others as they are."""
    sent: Tensors = {}
    for name, x in tensors.items():
        if not coded(name, x):
            sent[name] = x
        else:
            sent[labelled(name, x)] = encode_one(codec, x, noise.for_array(name))
    return sent


def encode_one(codec: ArrayCodec, x: Tensor, noise: Noise) -> Tensor:
    """The payload of an array; where there are only shapes, a shape."""
    if x.is_meta:
        return torch.empty(codec.size(x.shape, x.dtype), dtype=torch.uint8, device="meta")
    return codec.encode(x.detach(), noise) if x.numel() else torch.empty(0, dtype=torch.uint8)


def decode_all(codec: ArrayCodec, sent: Mapping[str, Tensor]) -> Tensors:
    """The arrays that were given to `encode_all`, with what the codec has lost."""
    tensors: Tensors = {}
    for label, payload in sent.items():
        was = read_label(label)
        if was is None:
            tensors[label] = payload
        else:
            tensors[was.name] = decode_one(codec, payload, was)
    return tensors


class Label(NamedTuple):
    """What the name of a coded array says."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def decode_one(codec: ArrayCodec, payload: Tensor, was: Label) -> Tensor:
    """The array of a payload. Raises a CodecError if the payload has not the length that its name implies."""
    right = codec.size(was.shape, was.dtype)
    fits = payload.numel() <= right if codec.varies else payload.numel() == right
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not fits:
        found = f"{payload.numel():,} elements of {str(payload.dtype).removeprefix('torch.')}"
        raise CodecError(f"The payload of '{was.name}' has {found} where {right:,} bytes are expected.")
    if payload.is_meta or not math.prod(was.shape):
        return torch.empty(was.shape, dtype=was.dtype, device=payload.device)
    return codec.decode(payload, was.shape, was.dtype)


def labelled(name: str, x: Tensor) -> str:
    """The name of an array that was coded."""
    shape = ",".join(str(size) for size in x.shape)
    return f"{name}@{str(x.dtype).removeprefix('torch.')}[{shape}]"


# A peer chooses the name, so digits must match in one way only: the expression would try all others.
_LABEL = re.compile(r"(.*)@(\w+)\[((?:\d{1,15}(?:,\d{1,15}){0,15})?)\]", re.ASCII | re.DOTALL)


def read_label(label: str) -> Label | None:
    """What a name says; None where nothing was coded."""
    found = _LABEL.fullmatch(label)
    if found is None or found[2] not in DTYPES:
        return None
    shape = tuple(int(size) for size in found[3].split(",") if size)
    if math.prod(shape) > LARGEST:
        raise CodecError(f"'{label[:80]}' is larger than any array of a model.")
    return Label(found[1], DTYPES[found[2]], shape)


def plain_name(label: str) -> str:
    """The name of an array, whether it was coded or not."""
    was = read_label(label)
    return label if was is None else was.name


def as_bytes(*arrays: Tensor) -> Tensor:
    """Arrays one behind the other, as bytes."""
    return torch.cat([array.contiguous().view(-1).view(torch.uint8) for array in arrays])


def of_bytes(payload: Tensor, *parts: tuple[int, torch.dtype]) -> list[Tensor]:
    """The arrays, each of so many elements, that `as_bytes` put together; they are copies, so they are aligned."""
    found, place = [], 0
    for count, dtype in parts:
        end = place + count * dtype.itemsize
        found.append(payload[place:end].clone().view(dtype))
        place = end
    return found

"""zstd behind any other codec: zeros of a ReLU and histograms with a peak become shorter."""

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsl_sage.errors import MissingExtra
from fsl_sage.wire.codecs.arrays import ArrayCodec, CodecError, Label, Noise, Shape

LEVEL = 1
"""The fastest level of zstd. Higher ones gain a few per cent on packed codes and take many times as long."""


class Compressed(ArrayCodec):
    """Another codec's payload, compressed; as it is where that would not be shorter.

    A payload of the full length is one that is not compressed, so no flag is needed. What a payload becomes is known
    before it is unpacked: it must say so itself, and no more memory than that is ever taken.
    """

    varies = True

    def __init__(self, inner: ArrayCodec) -> None:
        self.inner = inner
        self.is_absolute = inner.is_absolute
        zstd()  # fails here, and not in the middle of a run

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """The largest possible length."""
        return self.inner.size(shape, dtype)

    def encode(self, x: Tensor, noise: Noise) -> Tensor:
        """The shorter of the two."""
        plain = self.inner.encode(x, noise)
        short = zstd().ZstdCompressor(level=LEVEL).compress(plain.cpu().numpy().data)
        if len(short) >= plain.numel():
            return plain
        return torch.from_numpy(np.frombuffer(short, np.uint8).copy()).to(x.device)

    def decode(self, payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Decompress the payload if it is compressed, and decode it."""
        return self.inner.decode(uncompressed(self, payload, Label("", dtype, tuple(shape))), shape, dtype)


def inner(codec: ArrayCodec | None) -> ArrayCodec | None:
    """The codec before the compression."""
    return codec.inner if isinstance(codec, Compressed) else codec


def uncompressed(codec: ArrayCodec, payload: Tensor, was: Label) -> Tensor:
    """The payload of the codec before the compression."""
    right = codec.size(was.shape, was.dtype)
    if not isinstance(codec, Compressed) or payload.numel() == right:
        return payload
    return torch.from_numpy(np.frombuffer(_unpacked(payload, right), np.uint8).copy()).to(payload.device)


def _unpacked(payload: Tensor, right: int) -> bytes:
    packed = payload.cpu().numpy().tobytes()
    try:
        said = zstd().frame_content_size(packed)
        if said != right:
            raise CodecError(f"A compressed payload unpacks to {said:,} bytes where {right:,} are expected.")
        plain: bytes = zstd().ZstdDecompressor().decompress(packed, max_output_size=right)
    except zstd().ZstdError as error:
        raise CodecError(f"A compressed payload is damaged: {error}.") from None
    if len(plain) != right:
        raise CodecError(f"A compressed payload unpacks to {len(plain):,} bytes where {right:,} are expected.")
    return plain


def zstd() -> Any:
    """The package `zstandard`, if it is there."""
    try:
        return importlib.import_module("zstandard")
    except ModuleNotFoundError:
        raise MissingExtra("A codec with +zstd", "codec") from None

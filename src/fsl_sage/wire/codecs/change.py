"""Weights: the difference from what the receiver has, with error feedback at the sender."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fsl_sage.wire.codecs.arrays import (
    ArrayCodec,
    CodecError,
    Label,
    Noise,
    decode_one,
    encode_one,
    labelled,
    read_label,
)
from fsl_sage.wire.message import Tensors


class Sent(NamedTuple):
    """Coded weights."""

    arrays: Tensors
    """The arrays that travel."""
    decoded: Tensors
    """The weights that the receiver decodes."""
    lost: Tensors
    """What the coding has lost. It is added the next time."""


class Change:
    """Codes a model that the receiver has an earlier version of.

    Sent is C(x - held + lost), and the receiver then has held + C(...). What C has lost is kept by the sender and added
    the next time, so over the rounds Σ decoded = Σ true - lost. With `absolute` the whole weights are
    coded instead, and a receiver that holds something else can use them too.
    """

    def __init__(self, codec: ArrayCodec, *, absolute: bool = False) -> None:
        self.codec = codec
        self.absolute = absolute
        """Whether the whole is coded."""

    @torch.no_grad()
    def encode(
        self,
        x: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        lost: Mapping[str, Tensor],
        coded: Collection[str],
        noise: Noise,
    ) -> Sent:
        """Code x for a receiver that has `held`.

        Args:
            x: The weights.
            held: What the receiver has.
            lost: What earlier codings have lost; empty without error feedback.
            coded: The names of the weights to code; the others travel as they are.
            noise: Of this transfer.
        """
        sent = Sent({}, {}, {})
        for name, new in x.items():
            if name not in coded or not new.is_floating_point():
                sent.arrays[name] = sent.decoded[name] = new
                continue
            wanted = new if self.absolute else new - held[name]
            if name in lost:
                wanted = wanted + lost[name]
            payload = encode_one(self.codec, wanted, noise.for_array(name))
            back = decode_one(self.codec, payload, Label(name, new.dtype, tuple(new.shape)))
            sent.arrays[labelled(name, new)] = payload
            sent.lost[name] = wanted - back
            sent.decoded[name] = back if self.absolute else held[name] + back
        return sent

    @torch.no_grad()
    def decode(self, arrays: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Tensors:
        """The weights that a receiver decodes, which has `held`."""
        decoded: Tensors = {}
        for label, payload in arrays.items():
            was = read_label(label)
            if was is None:
                decoded[label] = payload
            else:
                if was.name not in held or (held[was.name].shape, held[was.name].dtype) != (was.shape, was.dtype):
                    raise CodecError(f"'{was.name[:80]}' is no weight of this shape that the receiver has.")
                back = decode_one(self.codec, payload, was)
                decoded[was.name] = back if self.absolute else held[was.name] + back
        return decoded

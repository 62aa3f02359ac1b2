"""Activations: the difference from the last one of the same example."""

import torch
from torch import Tensor

from fsl_sage.wire.codecs.arrays import ArrayCodec, CodecError, Label, Noise, Shape, decode_one, encode_one


class Cached:
    """Both ends keep the last activation of each example, as it was decoded; what is coded is the difference from it.

    An example that is new has the activation 0, so its own is coded. What coding loses is in the next difference, and
    an activation that hardly moves comes nearer from epoch to epoch. `store` is that memory for one array of a client's
    uploads, [examples, ...]; where batches differ in their second dimension, the length of texts, it is as long as the
    longest has been, with zeros behind the shorter ones.
    """

    def __init__(self, codec: ArrayCodec) -> None:
        self.codec = codec

    def encode(self, x: Tensor, places: Tensor, store: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """The payload of the activations of these examples, and the new store."""
        before = _at(store, places, x.shape, x.dtype)
        payload = encode_one(self.codec, x.detach() - before, noise)
        _, store = self.decode(payload, Label("", x.dtype, tuple(x.shape)), places, store)
        return payload, store

    def decode(self, payload: Tensor, was: Label, places: Tensor, store: Tensor) -> tuple[Tensor, Tensor]:
        """The activations, and the new store."""
        if places.shape != was.shape[:1]:
            raise CodecError(f"An upload has the shape {list(was.shape)} for {places.numel():,} examples.")
        check_places(places, len(store))
        change = decode_one(self.codec, payload, was)
        x = _at(store, places, was.shape, was.dtype) + change
        return x, _put(store, places, x)


def check_places(places: Tensor, examples: int) -> None:
    """Refuse what cannot be a batch of a client with so many examples: each is there at most once.

    Args:
        places: Of the batch's examples among the client's own, int32 [B].
        examples: How many the client has.
    """
    if places.dtype != torch.int32 or places.dim() != 1:
        raise CodecError("The places of an upload's examples are not one row of whole numbers.")
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < examples:
        raise CodecError(f"An upload has examples beyond the {examples:,} of its client.")
    if len(set(places.tolist())) < len(places):
        raise CodecError("An upload has an example twice.")


def new_store(examples: int) -> Tensor:
    """A new store, without any activations."""
    return torch.zeros(examples, 0)


def _at(store: Tensor, places: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The last activations of these examples, as long as the batch that is to be coded; 0 where there was none."""
    if not store.numel():
        return torch.zeros(tuple(shape), dtype=dtype, device=places.device)
    if store.dim() != len(shape) or store.shape[2:] != torch.Size(shape[2:]) or store.dtype != dtype:
        raise CodecError(f"An upload has the shape {list(shape)}, where an example's is {list(store.shape[1:])}.")
    known = store[places.long()][:, : shape[1]]
    missing = shape[1] - known.shape[1]
    if not missing:
        return known
    return torch.cat([known, known.new_zeros(shape[0], missing, *shape[2:])], 1)


def _put(store: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """Remember activations. What a longer text had beyond the length of this batch is kept."""
    if not store.numel():
        store = x.new_zeros(len(store), *x.shape[1:])
    elif (missing := x.shape[1] - store.shape[1]) > 0:
        store = torch.cat([store, store.new_zeros(len(store), missing, *store.shape[2:])], 1)
    store[places.long(), : x.shape[1]] = x
    return store

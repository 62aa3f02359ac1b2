"""The two ends of the wire in a round: how a client and the S-server code and decode messages."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fsl_sage.wire.codecs.arrays import decode_one, labelled, read_label
from fsl_sage.wire.codecs.cached import new_store
from fsl_sage.wire.codecs.chosen import Codecs
from fsl_sage.wire.message import ACTIVATIONS, CUT_GRADIENTS, Message, Tensors, nbytes
from fsl_sage.wire.paths import below, by_client, flat, grouped

LOST, CACHE = "lost/", "cache/"
"""Prefixes in a state: what the coding of a client's updates has lost, and its examples' last activations."""
PLACES = "places"
"""Sent with activations that are differences: the places of their examples among the client's own, int32 [B]."""


class ClientEnd:
    """A client's end in one round; made from the `codec/` part of its state."""

    def __init__(self, codecs: Codecs, client: int, t: int, state: Mapping[str, Tensor], examples: int) -> None:
        self._codecs = codecs
        self._client = client
        self._round = t
        self._lost = below(LOST, state)
        self._cache = below(CACHE, state)
        self._examples = examples
        self._chosen: list[Tensor] = []
        """Which numbers of the last upload's activations were sent, if gradients come back at the same places."""

    def send(self, message: Message, places: Tensor | None = None) -> Message:
        """Code an upload. `places` [B] are those of its examples among the client's own."""
        step = int(message.values["step"])
        parts: dict[str, Mapping[str, Tensor]] = {}
        for kind, arrays in message.parts.items():
            if kind == ACTIVATIONS and self._codecs.cached is not None and _is_of(arrays, places):
                parts[kind] = self._send_differences(arrays, places, step)
            else:
                parts[kind] = self._codecs.encode("up", kind, arrays, self._client, self._round, step)
        if self._codecs.reuses_places and ACTIVATIONS in parts:
            self._chosen = list(self._codecs.chosen_places(parts[ACTIVATIONS]))
        return replace(message, parts=parts)

    def _send_differences(self, arrays: Mapping[str, Tensor], places: Tensor | None, step: int) -> Tensors:
        assert self._codecs.cached is not None
        assert places is not None
        places = places.to(torch.int32)
        sent = {PLACES: places}
        noise = self._codecs.noise(f"up/{ACTIVATIONS}", self._client, self._round, step)
        for name, x in arrays.items():
            if not x.is_floating_point():
                sent[name] = x
            elif x.is_meta:
                sent[labelled(name, x)] = torch.empty(
                    self._codecs.cached.codec.size(x.shape, x.dtype), dtype=torch.uint8, device="meta"
                )
            else:
                store = self._cache.get(name, new_store(self._examples))
                sent[labelled(name, x)], self._cache[name] = self._codecs.cached.encode(
                    x, places.to(x.device), store.to(x.device), noise.for_array(name)
                )
        return sent

    def receive(self, message: Message | None) -> Message | None:
        """Decode a reply."""
        if message is None:
            return None
        parts: dict[str, Mapping[str, Tensor]] = {}
        for kind, sent in message.parts.items():
            if kind == CUT_GRADIENTS and self._codecs.reuses_places:
                parts[kind] = self._codecs.decode_at_places(sent, self._chosen)
            else:
                parts[kind] = self._codecs.decode(kind, sent)
        return replace(message, parts=parts)

    def update(
        self, parts: Mapping[str, Tensors], held: Mapping[str, Tensors], coded: Mapping[str, Collection[str]]
    ) -> Mapping[str, Tensors]:
        """The weights that go to the F-server, by part, as they travel.

        Args:
            parts: The trained weights.
            held: What the client had got of them, as the F-server knows.
            coded: By part the names of weights to code.
        """
        if self._codecs.update is None:
            return parts
        names = {f"{part}/{name}" for part in parts for name in coded[part]}
        noise = self._codecs.noise("update", self._client, self._round)
        sent = self._codecs.update.encode(flat(parts), flat(held), self._lost, names, noise)
        self._lost = {**self._lost, **sent.lost}
        return grouped(sent.arrays)

    def state(self) -> Tensors:
        """What the client keeps for its next round."""
        return flat({LOST.rstrip("/"): self._lost, CACHE.rstrip("/"): self._cache})


class ServerEnd:
    """The S-server's end. Where differences are sent, it remembers the last activations of the clients' examples."""

    def __init__(self, codecs: Codecs, examples: Sequence[int], *, may_drop: bool) -> None:
        """Make the end.

        Args:
            codecs: Of the run.
            examples: For each client the number of its examples.
            may_drop: Whether a client may fail in the middle of a round, and be back with what it had before.
        """
        self._codecs = codecs
        self._examples = examples
        self._may_drop = may_drop
        self._caches: dict[int, Tensors] = {}
        self._before: dict[int, Tensors] = {}
        """The caches of clients that have uploaded in this round, from before the round."""
        self._chosen: dict[int, list[Tensor]] = {}

    def begin(self) -> None:
        """Start a round. What the last round has changed is now final."""
        self._before = {}

    def drop(self, client: int) -> None:
        """Forget what a client has sent in this round, because it failed. The client forgets it too."""
        if client in self._before:
            self._caches[client] = self._before.pop(client)
        self._chosen.pop(client, None)

    def receive(self, client: int, message: Message) -> Message:
        """Decode an upload: what the S-server trains on and stores."""
        if self._codecs.reuses_places and ACTIVATIONS in message.parts:
            self._chosen[client] = list(self._codecs.chosen_places(message.parts[ACTIVATIONS]))
        parts: dict[str, Mapping[str, Tensor]] = {}
        for kind, sent in message.parts.items():
            if kind == ACTIVATIONS and self._codecs.cached is not None and PLACES in sent:
                parts[kind] = dict(self._differences(client, sent))
            else:
                parts[kind] = self._codecs.decode(kind, sent)
        return replace(message, parts=parts)

    def _differences(self, client: int, sent: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        assert self._codecs.cached is not None
        own = self._caches.setdefault(client, {})
        if self._may_drop and client not in self._before:
            self._before[client] = {name: store.clone() for name, store in own.items()}
        for label, payload in sent.items():
            was = read_label(label)
            if label == PLACES:
                continue
            if was is None:
                yield label, payload
            elif payload.is_meta:
                yield was.name, decode_one(self._codecs.cached.codec, payload, was)
            else:
                store = own.get(was.name, new_store(self._examples[client])).to(payload.device)
                x, own[was.name] = self._codecs.cached.decode(payload, was, sent[PLACES].to(payload.device), store)
                yield was.name, x

    def send(self, t: int, client: int, step: int, message: Message) -> Message:
        """Code a reply."""
        parts: dict[str, Mapping[str, Tensor]] = {}
        for kind, arrays in message.parts.items():
            if kind == CUT_GRADIENTS and self._codecs.reuses_places:
                parts[kind] = self._codecs.encode_at_places(arrays, self._chosen.pop(client))
            else:
                parts[kind] = self._codecs.encode("down", kind, arrays, client, t, step)
        return replace(message, parts=parts)

    def memory(self) -> int:
        """Bytes of remembered activations. The clients together remember as many."""
        return sum(nbytes(own) for own in self._caches.values())

    def state(self) -> Tensors:
        """The state as a flat dict, for a checkpoint between rounds."""
        return flat({str(client): own for client, own in self._caches.items()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._caches, self._before, self._chosen = by_client(state), {}, {}


def _is_of(arrays: Mapping[str, Tensor], places: Tensor | None) -> bool:
    """Whether these are activations of the examples at these places, one for each."""
    return places is not None and all(x.dim() > 1 and len(x) == len(places) for x in arrays.values())

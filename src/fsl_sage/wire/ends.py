"""The two ends of the wire in a round: what a client or the S-server does with a message that it sends or gets."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import Tensor

from fsl_sage.wire.codecs import Codecs
from fsl_sage.wire.message import Message, Tensors
from fsl_sage.wire.paths import below, flat, grouped

LOST = "lost/"
"""Before the paths of what the coding of a client's updates has lost."""


class ClientEnd:
    """A client's end in one round; made from the `codec/` part of its state."""

    def __init__(self, codecs: Codecs, client: int, t: int, state: Mapping[str, Tensor]) -> None:
        self._codecs = codecs
        self._client = client
        self._round = t
        self._lost = below(LOST, state)

    def send(self, message: Message) -> Message:
        """An upload as it travels."""
        step = int(message.values["step"])
        parts = {
            kind: self._codecs.encode("up", kind, arrays, self._client, self._round, step)
            for kind, arrays in message.parts.items()
        }
        return replace(message, parts=parts)

    def receive(self, message: Message | None) -> Message | None:
        """A reply as the client reads it."""
        if message is None:
            return None
        return replace(message, parts={kind: self._codecs.decode(kind, sent) for kind, sent in message.parts.items()})

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
        return {f"{LOST}{path}": tensor for path, tensor in self._lost.items()}


class ServerEnd:
    """The S-server's end."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs

    def receive(self, client: int, message: Message) -> Message:
        """An upload as the S-server reads it: what it trains on and stores."""
        return replace(message, parts={kind: self._codecs.decode(kind, sent) for kind, sent in message.parts.items()})

    def send(self, t: int, client: int, step: int, message: Message) -> Message:
        """A reply as it travels."""
        parts = {
            kind: self._codecs.encode("down", kind, arrays, client, t, step) for kind, arrays in message.parts.items()
        }
        return replace(message, parts=parts)

"""The link: the one way by which anything travels between the roles.

Uploads, replies, updates, averaged weights and mail are all messages that go through `Link.up` or `Link.down`: their
arrays are encoded, what was encoded is billed, and the receiver gets what was decoded. So bytes are counted in one
place, from what is really sent.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fsl_sage.wire.codecs import Codec, Identity
from fsl_sage.wire.ledger import Direction, Ledger
from fsl_sage.wire.message import OPTIMIZER_STATE, Message, nbytes

IDENTITY = Identity()


class Link:
    """Carries messages, and bills them to a ledger."""

    def __init__(self, ledger: Ledger, codecs: Mapping[str, Codec] | None = None) -> None:
        """`codecs` by kind of message; arrays of other kinds travel as they are."""
        self.ledger = ledger
        self._codecs = codecs or {}

    def up(self, t: int, client: int, message: Message) -> Message:
        """From a client to a server, in round t. Returns what arrives."""
        return self._carry(t, client, "up", message)

    def down(self, t: int, client: int, message: Message) -> Message:
        """From a server to a client, billed to round t. Returns what arrives."""
        return self._carry(t, client, "down", message)

    def _carry(self, t: int, client: int, direction: Direction, message: Message) -> Message:
        arrived = {}
        for kind, tensors in message.parts.items():
            codec = self._codecs.get(kind, IDENTITY)
            sent = codec.encode(tensors)
            self.ledger.bill(t, client, direction, kind, nbytes(_payload(kind, sent)))
            arrived[kind] = codec.decode(sent)
        return replace(message, parts=arrived)


def _payload(kind: str, sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What is billed: all arrays, but not an optimizer's step counters, which are plain numbers."""
    return {name: x for name, x in sent.items() if x.dim()} if kind == OPTIMIZER_STATE else sent

"""The link: everything that travels between the roles goes through it.

Uploads, replies, updates, averaged weights and mail are all messages that go through `Link.up` or `Link.down`, coded
by the sender (`codecs`, `ends`). What is sent is billed here, so bytes are counted in one place.
"""

from collections.abc import Mapping

from torch import Tensor

from fsl_sage.wire.ledger import Direction, Ledger
from fsl_sage.wire.message import OPTIMIZER_STATE, Message, nbytes


class Link:
    """Carries messages, and bills them to a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def up(self, t: int, client: int, message: Message) -> Message:
        """From a client to a server, in round t. Returns what arrives."""
        return self._carry(t, client, "up", message)

    def down(self, t: int, client: int, message: Message) -> Message:
        """From a server to a client, billed to round t. Returns what arrives."""
        return self._carry(t, client, "down", message)

    def _carry(self, t: int, client: int, direction: Direction, message: Message) -> Message:
        for kind, arrays in message.parts.items():
            sent = message.changes.get(kind, arrays)
            self.ledger.bill(t, client, direction, kind, nbytes(_payload(kind, sent)))
        return message


def _payload(kind: str, sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What is billed: all arrays, but not an optimizer's step counters, which are plain numbers."""
    return {name: x for name, x in sent.items() if x.dim()} if kind == OPTIMIZER_STATE else sent

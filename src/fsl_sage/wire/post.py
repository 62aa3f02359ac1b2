"""The post: which weights each client has, what waits for it, and the bill for every delivery.

A download is billed to the round whose averaging or alignment made it, once for each member of that round's cohort;
to an absent client when it returns. What precedes round 0 is the first download.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from fsl_sage.wire.ledger import BEFORE, Ledger
from fsl_sage.wire.message import FIRST_DOWNLOAD, Message, Tensors

NOTHING = -2
"""The version of a client that has not yet received anything."""

LOST = -3
"""The version of a client that failed in a round."""

INITIAL = -1
"""The version of the weights before any averaging."""


class Post:
    """Delivers averaged weights and messages to the clients and bills them."""

    def __init__(self, ledger: Ledger, clients: int) -> None:
        self.ledger = ledger
        self.version = INITIAL
        self.has = [NOTHING] * clients
        self.waiting: dict[int, dict[str, Tensors]] = {}
        """Messages for a client by kind; only the newest of a kind is kept."""
        self._paid: set[tuple[int, str]] = set()

    def welcome(
        self, t: int, clients: Iterable[int], held: Mapping[str, int], averaged: Mapping[str, int], frozen: int = 0
    ) -> None:
        """Bill what clients lack before round t: `held` and `frozen` to new ones, `averaged` to returning ones.

        These are bytes, by kind. Frozen weights are a first download whenever a client comes; the rest of it is the
        first download only before the first average, later it is today's model.
        """
        for client in clients:
            if self.has[client] == NOTHING:
                self._introduce(t, client, held, averaged, frozen)
            elif self.has[client] != self.version:
                for kind, amount in averaged.items():
                    self.ledger.bill(t, client, "down", kind, amount)
            self.has[client] = self.version
            for kind, tensors in self.waiting.get(client, {}).items():
                self._pay(t, client, kind, tensors)

    def _introduce(
        self, t: int, client: int, held: Mapping[str, int], averaged: Mapping[str, int], frozen: int
    ) -> None:
        """Bill a client's first download. In round 0 only what was averaged in it already is not part of that."""
        # What waits for the client takes the place of what it would else hold, and is billed with the messages.
        lacks = {kind: amount for kind, amount in held.items() if kind not in self.waiting.get(client, {})}
        if t > 0:
            self.ledger.bill(t, client, "down", FIRST_DOWNLOAD, frozen)
        else:
            now = {} if self.version == INITIAL else dict(averaged)
            first = sum(lacks.values()) - sum(now.values()) + frozen
            self.ledger.bill(BEFORE, client, "down", FIRST_DOWNLOAD, first)
            lacks = now
        for kind, amount in lacks.items():
            self.ledger.bill(t, client, "down", kind, amount)

    def renew(self) -> None:
        """There are new averaged weights. Who needs them gets them with `welcome` or `broadcast`."""
        self.version += 1

    def broadcast(self, t: int, clients: Iterable[int], averaged: Mapping[str, int]) -> None:
        """The newest averaged weights go to these members of the cohort at once, and are billed."""
        for client in clients:
            self.has[client] = self.version
            for kind, amount in averaged.items():
                self.ledger.bill(t, client, "down", kind, amount)

    def send(self, t: int, client: int, message: Message, *, present: bool) -> None:
        """Leave a message for a client; paid now by a member of the cohort, on its return by an absent client."""
        for kind, tensors in message.parts.items():
            self.waiting.setdefault(client, {})[kind] = dict(tensors)
            self._paid.discard((client, kind))
            if present:
                self._pay(t, client, kind, tensors)

    def arrived(self, client: int) -> None:
        """A client has taken part in the round, so what waited for it has reached it."""
        for kind in self.waiting.pop(client, {}):
            self._paid.discard((client, kind))

    def lost(self, client: int) -> None:
        """A client did not come to the end of the round: it gets everything anew, and pays anew, when it returns."""
        self.has[client] = LOST
        self._paid -= {(client, kind) for kind in self.waiting.get(client, {})}

    def _pay(self, t: int, client: int, kind: str, tensors: Mapping[str, Tensor]) -> None:
        if (client, kind) not in self._paid:
            self.ledger.bill(t, client, "down", kind, sum(x.numel() * x.element_size() for x in tensors.values()))
            self._paid.add((client, kind))

    def state(self) -> tuple[Tensors, dict[str, object]]:
        """Tensors and plain values for a checkpoint."""
        tensors = {
            f"{client}/{kind}/{name}": tensor
            for client, parts in self.waiting.items()
            for kind, arrays in parts.items()
            for name, tensor in arrays.items()
        }
        return tensors, {"version": self.version, "has": self.has, "paid": sorted(self._paid)}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> None:
        """Take up where `state` left."""
        self.waiting = {}
        for path, tensor in tensors.items():
            client, kind, name = path.split("/", 2)
            self.waiting.setdefault(int(client), {}).setdefault(kind, {})[name] = tensor
        self.version, self.has = values["version"], list(values["has"])  # type: ignore[assignment, call-overload]
        self._paid = {(client, kind) for client, kind in values["paid"]}  # type: ignore[attr-defined]

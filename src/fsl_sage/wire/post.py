"""The post: which weights each client has, and what waits for it. Every delivery goes over the link.

A download is billed to the round whose averaging or alignment made it, once for each member of that round's cohort;
to an absent client when it returns. What precedes round 0 is the first download.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fsl_sage.wire.codecs.arrays import plain_name
from fsl_sage.wire.ledger import BEFORE
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import FIRST_DOWNLOAD, Message, Tensors
from fsl_sage.wire.paths import below, flat, grouped

NOTHING = -2
"""The version of a client that has not yet received anything."""

LOST = -3
"""The version of a client that failed in a round, after one that it has taken part in."""

INITIAL = -1
"""The version of the weights before any averaging."""

CHANGE, CHANGES, FOR_ALL = "@change", "changes", "for_all"
"""Marks in a checkpoint: after the kind of a waiting difference, and before the coded newest weights."""


@dataclass(frozen=True)
class Download:
    """What clients get from the F-server, as it is now."""

    newest: Message
    """The averaged weights, and what the F-server sends with them, by kind."""
    held: Message
    """All that a client holds, by kind: the newest weights, and those that are not averaged or stay local."""
    frozen: Tensors = field(default_factory=dict)
    """Weights that never change."""
    in_turn: bool = False
    """Whether a client gets the averaged weights when its turn comes. They are then not part of the first download."""


@dataclass(frozen=True)
class Renewal:
    """The coded newest averaged weights, by kind."""

    changes: Mapping[str, Tensors] = field(default_factory=dict)
    """For clients that have the version before: differences."""
    for_all: Mapping[str, Tensors] = field(default_factory=dict)
    """For every client: codes that do not depend on what the receiver has."""


class Post:
    """Delivers averaged weights and messages to the clients."""

    def __init__(self, link: Link, clients: int) -> None:
        self.link = link
        self.version = INITIAL
        self.has = [NOTHING] * clients
        self.waiting: dict[int, dict[str, Tensors]] = {}
        """Messages for a client by kind; only the newest of a kind is kept."""
        self.changes: dict[int, dict[str, Tensors]] = {}
        """The same as coded differences from the message before, for a client that has that one."""
        self.renewal = Renewal()
        self._paid: set[tuple[int, str]] = set()
        self._known: set[int] = set()
        """Clients that have taken part in a round: they hold what the first download brought."""

    def welcome(self, t: int, clients: Iterable[int], download: Download) -> frozenset[int]:
        """Send what clients lack before round t: all that they hold to new ones, the averages to returning ones.

        Frozen weights are a first download whenever a client comes. The rest is a first download only before the first
        average; later it is today's model. Returns the clients that have returned to newer averages.
        """
        clients = list(clients)
        returning = frozenset(client for client in clients if self.has[client] not in (NOTHING, self.version))
        for client in clients:
            if self.has[client] == NOTHING:
                self._introduce(t, client, download)
            elif client in returning:
                self._bring(t, client, download.newest)
            self.has[client] = self.version
            for kind in self.waiting.get(client, {}):
                self._pay(t, client, kind)
        return returning

    def _introduce(self, t: int, client: int, download: Download) -> None:
        """Send a client its first download. In round 0 only what was averaged in it already is not part of that.

        Where nothing is ever averaged there is no model of today: all is a first download, whenever a client comes.
        """
        # A message that waits replaces the part that the client would hold otherwise, and is sent with the messages.
        held = {kind: x for kind, x in download.held.parts.items() if kind not in self.waiting.get(client, {})}
        if t > 0 and download.newest.parts:
            self.link.down(t, client, Message({FIRST_DOWNLOAD: download.frozen, **held}))
            return
        now = {} if self.version == INITIAL and not download.in_turn else download.newest.parts
        first = {
            f"{kind}/{name}": tensor
            for kind, tensors in held.items()
            for name, tensor in tensors.items()
            if name not in now.get(kind, {})
        }
        frozen = {f"frozen/{name}": tensor for name, tensor in download.frozen.items()}
        self.link.down(t or BEFORE, client, Message({FIRST_DOWNLOAD: {**first, **frozen}}))
        self.link.down(t, client, Message(now))

    def renew(self, renewal: Renewal | None = None) -> None:
        """Take over new averaged weights. Clients get them with `welcome` or `broadcast`."""
        self.version += 1
        self.renewal = renewal or Renewal()

    def broadcast(self, t: int, clients: Iterable[int], newest: Message) -> None:
        """Send the newest averaged weights to these members of the cohort."""
        for client in clients:
            self._bring(t, client, newest)
            self.has[client] = self.version

    def _bring(self, t: int, client: int, newest: Message) -> None:
        """Send the newest weights: as a difference to a client that has the version before, else whole."""
        changes = {kind: _of(newest.parts.get(kind, {}), change) for kind, change in self.renewing(client).items()}
        self.link.down(t, client, replace(newest, changes=changes))

    def renewing(self, client: int) -> Mapping[str, Tensors]:
        """By kind, the codes that are sent to a client instead of the newest weights."""
        last = self.has[client] == self.version - 1 and self.has[client] >= INITIAL
        return {**self.renewal.for_all, **(self.renewal.changes if last else {})}

    def send(self, t: int, client: int, message: Message, *, present: bool) -> None:
        """Send a message to a client: now if it is in the cohort, else when it returns."""
        for kind, tensors in message.parts.items():
            # A difference is only useful to a client that has the message before: that one must not be waiting itself.
            follows = self.has[client] >= INITIAL and kind not in self.waiting.get(client, {})
            self._keep_change(client, kind, message.changes.get(kind) if follows else None)
            self.waiting.setdefault(client, {})[kind] = dict(tensors)
            self._paid.discard((client, kind))
            if present:
                self._pay(t, client, kind)

    def _keep_change(self, client: int, kind: str, change: Mapping[str, Tensor] | None) -> None:
        own = self.changes.setdefault(client, {})
        own.pop(kind, None)
        if change is not None:
            own[kind] = dict(change)
        if not own:
            del self.changes[client]

    def arrived(self, client: int) -> None:
        """Note that a client has taken part in the round: what waited for it has arrived."""
        self._known.add(client)
        self.changes.pop(client, None)
        for kind in self.waiting.pop(client, {}):
            self._paid.discard((client, kind))

    def lost(self, client: int) -> None:
        """Note that a client failed in the round. When it returns it gets everything again, and is billed again.

        One that has never been heard from gets its first download again too.
        """
        self.has[client] = LOST if client in self._known else NOTHING
        self.changes.pop(client, None)
        self._paid -= {(client, kind) for kind in self.waiting.get(client, {})}

    def _pay(self, t: int, client: int, kind: str) -> None:
        if (client, kind) not in self._paid:
            waiting, changes = self.waiting[client], self.changes.get(client, {})
            self.link.down(t, client, Message({kind: waiting[kind]}, changes=changes))
            self._paid.add((client, kind))

    def state(self) -> tuple[Tensors, dict[str, object]]:
        """Tensors and plain values for a checkpoint."""
        tensors = {
            f"{client}/{kind}{mark}/{name}": tensor
            for mark, kept in (("", self.waiting), (CHANGE, self.changes))
            for client, parts in kept.items()
            for kind, arrays in parts.items()
            for name, tensor in arrays.items()
        }
        tensors |= flat(self.renewal.changes, f"{CHANGES}/") | flat(self.renewal.for_all, f"{FOR_ALL}/")
        known = {"known": sorted(self._known), "paid": sorted(self._paid)}
        return tensors, {"version": self.version, "has": self.has, **known}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> None:
        """Restore what `state` returned."""
        self.renewal = Renewal(*(grouped(below(f"{group}/", tensors)) for group in (CHANGES, FOR_ALL)))
        self.waiting, self.changes = {}, {}
        for path, tensor in tensors.items():
            client, kind, name = path.split("/", 2)
            if client not in (CHANGES, FOR_ALL):
                kept = self.changes if kind.endswith(CHANGE) else self.waiting
                kept.setdefault(int(client), {}).setdefault(kind.removesuffix(CHANGE), {})[name] = tensor
        self.version, self.has = values["version"], list(values["has"])  # type: ignore[assignment, call-overload]
        self._paid = {(client, kind) for client, kind in values["paid"]}  # type: ignore[attr-defined]
        heard = [client for client, version in enumerate(self.has) if version != NOTHING]  # as earlier versions had it
        self._known = set(values.get("known", heard))  # type: ignore[call-overload]


def _of(weights: Mapping[str, Tensor], change: Tensors) -> Tensors:
    """The part of a change that concerns these weights. A client with a cut of its own may hold fewer than others."""
    return {label: x for label, x in change.items() if plain_name(label) in weights}

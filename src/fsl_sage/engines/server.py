"""The S-server's side of a run, as every engine asks for it, and the form of what an engine saves."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.engines.base import Setup, bill
from fsl_sage.engines.worker import mean_loss
from fsl_sage.roles.client import below
from fsl_sage.roles.s_server import SpreadOver, SServer, by_client
from fsl_sage.roles.work import Parts, Workbench
from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.message import Message, Tensors

Uploads = dict[int, Message]
"""Uploads of one step by client."""

Replies = dict[int, Message | None]
"""What the S-server answers to them."""


class ServerSide:
    """The S-server with its modules, and the algorithm's part at it."""

    def __init__(self, setup: Setup, spread: SpreadOver) -> None:
        self.setup = setup
        self._spread = spread
        self.server = self._new()

    def _new(self) -> SServer:
        setup = self.setup
        bench = Workbench({"server": setup.modules["server"]})
        return SServer(setup.settings, bench, setup.initial, setup.client_weights, self._spread)

    def begin(self, t: int) -> None:
        """Round t starts."""
        self.server.begin(t)

    def exchange(self, uploads: Uploads, ledger: Ledger) -> Replies:
        """Uploads of one step to the S-server, its replies back; both billed."""
        t = self.server.round
        for id, upload in uploads.items():
            bill(ledger, t, id, "up", upload)
        replies = self.setup.algorithm.on_uploads(self.server, uploads) if uploads else {}
        for id, reply in replies.items():
            if reply is not None:
                bill(ledger, t, id, "down", reply)
        return replies

    def share_auxiliary(self, tensors: Tensors) -> None:
        """An auxiliary that the F-server has averaged."""
        self.server.set_auxiliary(tensors)

    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """Alignment, where the algorithm has one, and what the S-server has left for clients during the round."""
        return [*self.setup.algorithm.end_of_round(self.server, t), *self.server.left]

    def remarks(self) -> dict[str, Any]:
        """Of this round: whether an auxiliary was aligned, and why others were not."""
        skipped = {"alignment_skipped": dict(self.server.skipped)} if self.server.skipped else {}
        return {"aligned": self.server.aligned, **skipped}

    def drop(self, client: int) -> None:
        """A client has failed in this round."""
        self.server.drop(client)

    def fidelity(self, seen: bool = False) -> Fidelity | None:
        """On newest uploads that the last alignment has not seen, or on those that it has."""
        return self.server.fidelity(seen=seen)

    def recalibrated(self) -> Tensors:
        """The S-server's model with BatchNorm statistics estimated anew."""
        return self.server.recalibrated()

    def loss(self) -> float | None:
        """Mean over the steps since the last call."""
        if not self.server.losses:
            return None
        loss = mean_loss(self.server.losses)
        self.server.losses.clear()
        return loss

    def weights(self) -> Tensors:
        """The S-server's model."""
        return self.server.weights()

    def state(self) -> Tensors:
        """A flat dict; between rounds."""
        return self.server.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left, whatever has happened since."""
        self.server = self._new()
        self.server.load_state(state)


def join_states(clients: Mapping[int, Tensors], server: Tensors | None) -> Tensors:
    """What an engine saves: `clients/ID/…` and `server/…`."""
    state = {f"clients/{id}/{path}": x for id, kept in clients.items() for path, x in kept.items()}
    return state | {f"server/{path}": tensor for path, tensor in (server or {}).items()}


def part_states(state: Mapping[str, Tensor]) -> tuple[dict[int, Tensors], Tensors]:
    """The states of the clients and of the S-server that `join_states` put together."""
    return by_client(below("clients/", state)), below("server/", state)


def local_tensors(setup: Setup, clients: Mapping[int, Tensors]) -> list[Parts]:
    """By client, in order: what of averaged parts it keeps for itself."""
    local = setup.settings.stays_local
    kept: list[Parts] = []
    for _, state in sorted(clients.items()):
        parts = {part: below(f"own/{part}/", state) for part in setup.algorithm.averaged}
        kept.append({part: {n: x for n, x in own.items() if n in local[part]} for part, own in parts.items()})
    return kept

"""The S-server in this process, which runs the algorithm's code at it, and the layout of an engine's state."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.engines.base import Replies, Server, Setup, Uploads
from fsl_sage.roles.footprint import Footprint
from fsl_sage.roles.protocols import Parts, SServerRole
from fsl_sage.roles.s_server import SServer
from fsl_sage.roles.server_jobs import SpreadOver
from fsl_sage.roles.work import Workbench
from fsl_sage.wire.ends import ServerEnd
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import Message, Tensors
from fsl_sage.wire.paths import below, by_client, flat

CODEC = "codec"
"""The prefix of what the codecs remember, in the state of the S-server."""
CACHE_BYTES = "codec_cache_bytes"
"""Among the S-server's remarks: bytes of activations that it remembers for its codec."""


class HostedServer(Server):
    """The S-server, in this process."""

    def __init__(self, setup: Setup, role: SServerRole) -> None:
        self.role = role
        self._algorithm = setup.algorithm
        examples = [len(own) for own in setup.examples]
        may_drop = setup.settings.config.on_client_failure == "drop"
        self._end = ServerEnd(setup.settings.codecs, examples, may_drop=may_drop)

    @classmethod
    def training(cls, setup: Setup, spread: SpreadOver) -> "HostedServer":
        """A server that computes; `spread` runs jobs in parallel."""
        bench = Workbench(setup.at_s_server())
        initial = setup.initial
        if setup.cuts:  # x_s begins at the shallowest cut; the weights in the setup are those of the deepest
            whole = {**initial["client"], **initial["server"]}
            initial = {**initial, "server": bench.slots["server"].only(whole)}
        return cls(setup, SServer(setup.settings, bench, initial, setup.client_weights, spread, setup.cuts))

    def begin(self, t: int) -> None:
        """Round t starts, or another group of its clients."""
        self._end.begin()
        self.role.begin(t)

    def exchange(self, uploads: Uploads, link: Link) -> Replies:
        """Uploads of one step to the S-server, its replies back."""
        if not uploads:
            return {}
        t = self.role.round
        arrived = {id: self._end.receive(id, link.up(t, id, upload)) for id, upload in uploads.items()}
        with self.role.watched():
            replies = self._algorithm.on_uploads(self.role, arrived)
        sent: Replies = {}
        for id, reply in replies.items():
            step = int(uploads[id].values["step"])
            sent[id] = reply if reply is None else link.down(t, id, self._end.send(t, id, step, reply))
        return sent

    def drop(self, client: int) -> None:
        """A client has failed in this round."""
        self._end.drop(client)
        self.role.drop(client)

    def fold_copy(self, client: int, cohort: Sequence[int]) -> None:
        """The round of this client is over, which has a server-side model of its own."""
        self.role.fold_copy(client, cohort)

    def set_auxiliary(self, tensors: Tensors) -> None:
        """An auxiliary that the F-server has averaged."""
        self.role.set_auxiliary(tensors)

    def take(self, tensors: Tensors) -> None:
        """Weights that the F-server has averaged."""
        own = self.role.weights()
        self.role.set_weights({**own, **{name: x for name, x in tensors.items() if name in own}})

    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """Alignment, where the algorithm has one, and what the S-server has left for clients during the round."""
        with self.role.watched():
            messages = list(self._algorithm.end_of_round(self.role, t))
        return [*messages, *self.role.left]

    def remarks(self) -> dict[str, Any]:
        """Whether an auxiliary was aligned in this round, why others were not, and what the codecs remember."""
        return {**self.role.remarks(), **({CACHE_BYTES: memory} if (memory := self._end.memory()) else {})}

    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """How well the auxiliaries estimate cut gradients, on uploads that the last alignment has not seen or has."""
        return self.role.fidelity(seen=seen)

    def footprint(self) -> Footprint | None:
        """Memory and operations of the first step."""
        return self.role.footprint()

    def take_loss(self) -> float | None:
        """Mean over the steps since the last call."""
        return self.role.take_loss()

    def weights(self) -> Tensors | None:
        """The server-side model."""
        return self.role.weights()

    def recalibrated(self) -> Tensors | None:
        """The server-side model with BatchNorm statistics estimated anew."""
        return self.role.recalibrated()

    def state(self) -> Tensors:
        """A flat dict; between rounds."""
        return {**self.role.state(), **flat({CODEC: self._end.state()})}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._end.load_state(below(f"{CODEC}/", state))
        self.role.load_state(state)


class NoServer(Server):
    """A stand-in for the S-server of algorithms that have none."""

    def begin(self, t: int) -> None:
        """Nothing to begin."""

    def exchange(self, uploads: Uploads, link: Link) -> Replies:
        """Nobody may upload."""
        assert not uploads, "an algorithm without an S-server must not upload"
        return {}

    def drop(self, client: int) -> None:
        """Nothing is kept of a client."""

    def fold_copy(self, client: int, cohort: Sequence[int]) -> None:
        """There is none."""

    def set_auxiliary(self, tensors: Tensors) -> None:
        """Nobody to tell."""

    def take(self, tensors: Tensors) -> None:
        """No model."""

    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """No messages."""
        return []

    def remarks(self) -> dict[str, Any]:
        """Nothing is aligned."""
        return {"aligned": False}

    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """Nothing is estimated."""
        return None

    def footprint(self) -> Footprint | None:
        """No steps."""
        return None

    def take_loss(self) -> float | None:
        """No steps."""
        return None

    def weights(self) -> Tensors | None:
        """No model."""
        return None

    def recalibrated(self) -> Tensors | None:
        """No model."""
        return None

    def state(self) -> Tensors:
        """Nothing to keep."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing was kept."""


def host_server(setup: Setup, spread: SpreadOver) -> HostedServer | NoServer:
    """The S-server of a run whose engine has it in this process."""
    return HostedServer.training(setup, spread) if setup.algorithm.has_s_server else NoServer()


def join_states(clients: Mapping[int, Tensors], server: Tensors) -> Tensors:
    """What an engine saves: `clients/ID/…` and `server/…`."""
    return flat({str(id): kept for id, kept in clients.items()}, "clients/") | flat({"server": server})


def part_states(state: Mapping[str, Tensor]) -> tuple[dict[int, Tensors], Tensors]:
    """The states of the clients and of the S-server that `join_states` put together."""
    return by_client(below("clients/", state)), below("server/", state)


def local_tensors(setup: Setup, clients: Mapping[int, Tensors]) -> dict[int, Parts]:
    """By client, in order: its own parts, and what of averaged parts it keeps for itself."""
    kept = (*setup.algorithm.averaged, *setup.algorithm.own_parts)
    return {id: {part: below(f"own/{part}/", state) for part in kept} for id, state in sorted(clients.items())}

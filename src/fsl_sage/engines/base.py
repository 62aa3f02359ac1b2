"""What an engine does: it runs the roles and carries their messages. It does not know which algorithm it runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.records.client_store import ClientStore, Named
from fsl_sage.roles.corrections import renew_controls
from fsl_sage.roles.footprint import Footprint
from fsl_sage.roles.protocols import ClientRole, Parts, Update
from fsl_sage.roles.work import Settings
from fsl_sage.wire.ends import ClientEnd
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import CONTROL, OPTIMIZER_STATE, PAUSE, Message, Tensors
from fsl_sage.wire.paths import below, flat
from fsl_sage.wire.post import INITIAL, Renewal

Uploads = dict[int, Message]
"""Uploads of one step by client."""

Replies = dict[int, Message | None]
"""What the S-server answers to them."""


@dataclass(frozen=True)
class Setup:
    """What every engine starts from."""

    settings: Settings
    algorithm: Algorithm
    modules: Mapping[str, nn.Module]
    """The parts of the model: "client", "server", "auxiliary"."""
    initial: Parts
    """The weights of each part before round 0."""
    examples: Sequence[Tensor]
    """For each client, the indices of its examples."""
    client_weights: Sequence[float]
    """How much each client counts in an average."""
    cuts: Sequence[str] = ()
    """By client its cut, if the cuts differ. `modules` and `initial` are then those of the deepest cut."""
    at_cut: Mapping[str, Mapping[str, nn.Module]] = field(default_factory=dict)
    """By cut, from the shallowest to the deepest, client and server part; empty if all clients have the same cut."""

    def held_by(self, client: int) -> Mapping[str, nn.Module]:
        """The parts that a client holds."""
        own = self.at_cut[self.cuts[client]] if self.cuts else self.modules
        return {part: own[part] for part in self.algorithm.holds}

    def only(self, parts: Collection[str]) -> "Setup":
        """The same with these parts of the model alone, for a process that needs no others."""
        return replace(
            self,
            modules=_chosen(self.modules, parts),
            initial=_chosen(self.initial, parts),
            at_cut={cut: _chosen(own, parts) for cut, own in self.at_cut.items()},
        )

    def initial_of(self, client: int, part: str) -> Tensors:
        """The initial weights of a part that a client holds."""
        if not self.cuts:
            return dict(self.initial[part])
        names = self.held_by(client)[part].state_dict()
        return {name: tensor for name, tensor in self.initial[part].items() if name in names}

    def at_s_server(self) -> Mapping[str, nn.Module]:
        """The modules of the S-server: x_s, which begins at the shallowest cut, and by cut the layers behind it.

        With one cut for all also the auxiliary, by whose features a ridge is fitted.
        """
        if not self.cuts:
            return {part: self.modules[part] for part in ("server", "auxiliary") if part in self.modules}
        servers = {cut: parts["server"] for cut, parts in self.at_cut.items()}
        return {"server": next(iter(servers.values())), **servers}


def _chosen(own: Mapping[str, Any], parts: Collection[str]) -> dict[str, Any]:
    return {part: value for part, value in own.items() if part in parts}


@dataclass(frozen=True)
class Delivery:
    """What the clients of a round get before it starts."""

    received: Parts
    """The newest averaged weights by part."""
    mail: Mapping[int, Mapping[str, Tensors]]
    """By client, the messages that waited for it: kind to named tensors."""
    extra: Mapping[str, Tensors] = field(default_factory=dict)
    """What the F-server sends with the weights, by kind."""
    renewed: frozenset[int] = frozenset()
    """Clients that were away when the newest weights were averaged, and get them now: what they have kept of these
    parts since an earlier round is older."""
    measured: int | None = None
    """The client whose first step is measured."""
    version: int = INITIAL
    """The number of the version of the averaged weights."""
    renewal: Renewal = field(default_factory=Renewal)
    """The averaged weights as they are sent, if they are coded; `received` is what clients decode."""
    changes: Mapping[int, Mapping[str, Tensors]] = field(default_factory=dict)
    """By client, its mail as it is sent, if it is coded; `mail` is what the client decodes."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a client's round: its update for the F-server, and the state it keeps."""

    update: Update
    state: Tensors


REMEDY = "A lower --optimizer.lr usually helps. A checkpoint, if there is one, is kept."
"""Advice for runs whose numbers are no longer finite."""


class ClientError(TrainingError):
    """An exception in the code of a client."""

    def __init__(self, client: int, t: int, reason: str) -> None:
        super().__init__(client, t, reason)
        self.client = client
        self.reason = reason
        self._message = f"Client {client} failed in round {t}: {reason}"
        self._round = t

    def __str__(self) -> str:
        return self._message

    def with_reason(self, reason: str) -> "ClientError":
        """The same failure with another reason; its notes stay."""
        other = ClientError(self.client, self._round, reason)
        for note in getattr(self, "__notes__", ()):
            other.add_note(note)
        return other


class LostError(TrainingError):
    """A run has lost something essential, such as the S-server. Its last checkpoint is kept."""


class Server(Protocol):
    """The S-server of a run as the experiment sees it, in this process or another."""

    @abstractmethod
    def set_auxiliary(self, tensors: Tensors) -> None:
        """Take over an auxiliary that the F-server has averaged."""

    @abstractmethod
    def take(self, tensors: Tensors) -> None:
        """Put weights that the F-server has averaged into x_s, where it has weights of these names."""

    @abstractmethod
    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """Run the algorithm's `end_of_round` at the S-server; returns (client, message) pairs."""

    @abstractmethod
    def remarks(self) -> dict[str, Any]:
        """Metrics of this round: whether an auxiliary was aligned, and why others were not."""

    @abstractmethod
    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """How well the auxiliaries estimate the cut gradients now; None where there is nothing to compare.

        On uploads that the last alignment has not seen; with `seen` on those that it has.
        """

    @abstractmethod
    def footprint(self) -> Footprint | None:
        """Memory and operations of its first step; None before it."""

    @abstractmethod
    def take_loss(self) -> float | None:
        """The mean loss of its steps since the last call; None if it took none."""

    @abstractmethod
    def weights(self) -> Tensors | None:
        """Its model x_s; None in algorithms without an S-server."""

    @abstractmethod
    def recalibrated(self) -> Tensors | None:
        """Its model with BatchNorm statistics estimated anew from stored uploads."""

    @abstractmethod
    def state(self) -> Tensors:
        """A flat dict; between rounds."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""


class Engine(ABC):
    """Runs clients and S-server. The experiment has the F-server and the mail."""

    server: Server
    """The S-server; a stand-in without a model in algorithms that have none."""
    takes_in_order: bool = False
    """Whether `on_update` is called."""
    on_update: Callable[[Update], Update] | None = None
    """Where it is given, called with each update in the order of the clients, as soon as those before it have come.
    `train` then returns what it has returned."""
    clients: ClientStore | None = None
    """The clients' states, where the engine keeps them."""

    def present(self, t: int, clients: Sequence[int]) -> list[int]:
        """Those of these clients that can be reached for round t: nothing is sent to the others, nor billed."""
        return list(clients)

    @abstractmethod
    def train(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> list[Update]:
        """Local rounds of these clients, with the S-server's part in them; uploads and replies go over the link.

        A client that failed and was dropped from the round has no update in the result.
        """

    def remarks(self) -> dict[str, Any]:
        """What this engine adds to the metrics of the round: the clients that failed, and the reasons."""
        return {}

    @abstractmethod
    def evaluate(self, parts: Parts) -> dict[str, Any]:
        """Metrics of the merged model on the test set."""

    @abstractmethod
    def local_tensors(self) -> dict[int, Parts]:
        """By client that has taken part, in order: its own parts, and what of averaged parts it keeps for itself.

        The latter are local BatchNorm statistics, and weights that it has trained since the last average.
        """

    @abstractmethod
    def state(self) -> Tensors:
        """S-server and clients as one flat dict; between rounds."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""

    def keep_in(self, directory: Path) -> None:
        """Say where clients' states may be kept that are too large for memory."""
        if self.clients is not None:
            self.clients.keep_in(directory)

    def checkpoint(self) -> tuple[Tensors, Named]:
        """What a checkpoint holds of `state`, and the files of clients' states that it names."""
        return self.state(), {}

    def restore(self, state: Mapping[str, Tensor], named: Any) -> None:
        """Restore what `checkpoint` returned."""
        self.load_state(state)

    def settle(self) -> None:
        """The checkpoint is in its place: files that it does not name may go."""
        if self.clients is not None:
            self.clients.settle()

    @abstractmethod
    def close(self) -> None:
        """Release threads and processes; a second time nothing happens."""


def begun(algorithm: Algorithm, client: ClientRole, t: int) -> LocalRound:
    """A client's local round, which is a generator. Its optimizers start with what came down for them, if it did."""
    take_optimizers(algorithm, client, t)
    return opened(algorithm, client, t)


def take_optimizers(algorithm: Algorithm, client: ClientRole, t: int) -> None:
    """Let a client's optimizers start with what came down for them, if it did."""
    remembered = client.received_extra.get(OPTIMIZER_STATE, {})
    for part in _with_averaged_optimizers(algorithm, t):
        client.set_optimizer_state(part, below(f"{part}/", remembered))


def opened(algorithm: Algorithm, client: ClientRole, t: int) -> LocalRound:
    """The local round of a client, or of a group of them, whose optimizers are ready."""
    local_round = algorithm.local_round(client, t)
    if not hasattr(local_round, "send"):
        raise InputError(
            f"local_round of {type(algorithm).__name__} gave a {type(local_round).__name__}: it must be a generator. "
            "If it uploads nothing, let it end with 'yield from ()'."
        )
    return local_round


def advance(local_round: LocalRound, reply: Message | None, *, pauses: bool = False) -> Message | None:
    """Continue a local round to its next upload, or with `pauses` to PAUSE; None when it is over."""
    try:
        said = local_round.send(reply)
        while said is PAUSE and not pauses:
            said = local_round.send(None)
        return _uploaded(said, local_round)
    except StopIteration:
        return None


def _uploaded(said: object, local_round: LocalRound) -> Message:
    if not isinstance(said, Message):
        whose = getattr(local_round, "__qualname__", "local_round")
        raise InputError(
            f"{whose} yields a {type(said).__name__}: what goes up is a Message, such as Smashed(z, batch.target)."
        )
    return said


def sent_along(setup: Setup, client: ClientRole, t: int) -> dict[str, Tensors]:
    """What goes to the F-server with a client's update: what the algorithm sends, SCAFFOLD's controls, optimizers."""
    extra = dict(setup.algorithm.on_update(client, t))
    parts = _with_averaged_optimizers(setup.algorithm, t)
    if remembered := flat({part: client.optimizer_state(part) for part in parts}):  # plain SGD remembers nothing
        extra[OPTIMIZER_STATE] = remembered
    if setup.settings.config.averaging.control_variates:
        always = setup.algorithm.averaged
        extra[CONTROL] = renew_controls(client, [part for part in setup.algorithm.averaged_in(t) if part in always])
    return extra


def _with_averaged_optimizers(algorithm: Algorithm, t: int) -> list[str]:
    """The parts whose optimizers' states go to the F-server with the weights in round t."""
    always = algorithm.averaged if algorithm.sends_optimizers else ()
    return [part for part in algorithm.averaged_in(t) if part in always]


def coded_update(setup: Setup, end: ClientEnd, update: Update, received: Parts) -> Update:
    """An update as it travels: the difference from the weights that the client has got."""
    return replace(
        update, parts=end.update(update.parts, known_weights(setup, update.parts, received), setup.settings.trained)
    )


def known_weights(setup: Setup, parts: Iterable[str], averaged: Parts) -> dict[str, Tensors]:
    """What client and F-server both have of these parts before a round: the average, or the weights before any."""
    return {part: {**setup.initial[part], **averaged.get(part, {})} for part in parts}


class Failures:
    """Clients that failed in a round: the first ends the run, or they are dropped and named in the round's metrics."""

    def __init__(self, policy: Literal["stop", "drop"]) -> None:
        self._policy = policy
        self._reasons: dict[str, str] = {}

    def note(self, outcomes: Mapping[int, Outcome | ClientError | None]) -> list[int]:
        """Record the failures among these outcomes; returns the clients that failed."""
        failed = {id: outcome for id, outcome in outcomes.items() if isinstance(outcome, ClientError)}
        for id, error in failed.items():
            if self._policy == "stop":
                raise error
            self._reasons[str(id)] = error.reason
        return list(failed)

    def told(self) -> dict[str, Any]:
        """The reasons by client, for the metrics. They are then forgotten."""
        reasons, self._reasons = self._reasons, {}
        return {"failures": reasons} if reasons else {}


def survivors(outcomes: Mapping[int, Outcome | ClientError]) -> dict[int, Outcome]:
    """The clients that came to the end of the round."""
    return {id: outcome for id, outcome in outcomes.items() if isinstance(outcome, Outcome)}

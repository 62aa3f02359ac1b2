"""What an engine does: it runs the roles and carries their messages. It does not know which algorithm it runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.roles.f_server import Update
from fsl_sage.roles.work import Parts, Settings
from fsl_sage.wire.ledger import Direction, Ledger
from fsl_sage.wire.message import Message, Tensors


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


@dataclass(frozen=True)
class Delivery:
    """What the clients of a round get before it starts."""

    received: Parts
    """The newest averaged weights by part."""
    mail: Mapping[int, Mapping[str, Tensors]]
    """By client, the messages that waited for it: kind to named tensors."""


class Engine(ABC):
    """Runs clients and S-server. The F-server and the post are the experiment's."""

    @abstractmethod
    def train(self, t: int, clients: Sequence[int], delivery: Delivery, ledger: Ledger) -> list[Update]:
        """Local rounds of these clients, with the S-server's part in them; bills every upload and reply.

        A client that failed and was dropped from the round has no update in the result.
        """

    def remarks(self) -> dict[str, Any]:
        """What this engine adds to the metrics of the round: where clients can fail, who did and why."""
        return {}

    @abstractmethod
    def share_auxiliary(self, tensors: Tensors) -> None:
        """Tell the S-server of an auxiliary that the F-server has averaged."""

    @abstractmethod
    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """The S-server's work after the averaging; messages for clients."""

    @abstractmethod
    def fidelity(self) -> Fidelity | None:
        """How well the auxiliaries estimate the cut gradients now; None where there is nothing to compare."""

    @abstractmethod
    def server_loss(self) -> float | None:
        """Mean loss of the S-server's steps since the last call; None if it took none."""

    @abstractmethod
    def server_weights(self) -> Tensors | None:
        """The S-server's model; None in algorithms without one."""

    @abstractmethod
    def evaluate(self, parts: Parts) -> dict[str, float]:
        """Metrics of the merged model on the test set."""

    @abstractmethod
    def local_tensors(self) -> list[Parts]:
        """For each client that has any, what of averaged parts it keeps for itself (local BatchNorm statistics)."""

    @abstractmethod
    def state(self) -> Tensors:
        """S-server and clients as one flat dict; between rounds."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and processes."""


def bill(ledger: Ledger, t: int, client: int, direction: Direction, message: Message) -> None:
    """Book a message."""
    for kind, amount in message.sizes().items():
        ledger.bill(t, client, direction, kind, amount)


def advance(local_round: LocalRound, reply: Message | None) -> Message | None:
    """A local round on to its next upload; None when it is over."""
    try:
        return local_round.send(reply)
    except StopIteration:
        return None

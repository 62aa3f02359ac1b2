"""What the roles can do, as an algorithm sees them.

An algorithm is written against these protocols alone. The roles that compute and the dry ones, which know shapes only,
implement the same protocols, so mypy finds a method that one of them lacks.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.alignment.passes import Smash
from fsl_sage.problems.base import Batch
from fsl_sage.wire.message import Message, Tensors
from fsl_sage.wire.paths import flat, grouped

Parts = Mapping[str, Tensors]
"""Weights by part of the model: "client", "server", "auxiliary"."""


@dataclass(frozen=True)
class Update:
    """What a client brings to the F-server at the end of its local round."""

    client: int
    parts: Parts
    """The trained weights by part."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Mean training losses of the round at this client, for the metrics."""
    extra: Mapping[str, Tensors] = field(default_factory=dict)
    """What the algorithm sends with them, by kind (`Algorithm.on_update`)."""

    def message(self, kinds: Mapping[str, str]) -> Message:
        """As it travels; `kinds` gives the ledger's kind of each part."""
        by_kind: dict[str, dict[str, Tensors]] = {}
        for part, tensors in self.parts.items():
            by_kind.setdefault(kinds[part], {})[part] = tensors
        return Message({**{kind: flat(parts) for kind, parts in by_kind.items()}, **self.extra}, self.losses)

    @classmethod
    def arrived(cls, client: int, message: Message, kinds: Iterable[str]) -> "Update":
        """The update in a message; `kinds` are those of parts, the others are what the algorithm sends."""
        models = set(kinds)
        parts: dict[str, Tensors] = {}
        extra: dict[str, Tensors] = {}
        for kind, tensors in message.parts.items():
            if kind in models:
                parts |= grouped(tensors)
            else:
                extra[kind] = dict(tensors)
        losses = {name: float(value) for name, value in message.values.items()}
        return cls(client, parts, losses, extra)


class ClientRole(Protocol):
    """A client during one round. z_f, z_b and features are tuples of tensors, [B, *cut] each."""

    id: int
    round: int
    step_index: int
    """The number of the batch at hand, from 0."""
    examples: Tensor
    """The indices of its examples, [n]."""
    received: Parts
    """The averaged weights that came down, by part."""
    received_extra: Mapping[str, Tensors]
    """What the F-server sent with them, by kind (`FServerRole.sends`)."""
    extra: Tensors
    """What an algorithm keeps at this client from round to round."""
    lr_used: float
    """The sum of the learning rates of this round's steps so far."""

    @abstractmethod
    def batches(self, t: int) -> Iterator[Batch]:
        """The mini-batches of round t: E epochs in random order, or K steps."""

    @abstractmethod
    def forward(self, batch: Batch) -> Smash:
        """z_f, the smashed data, with the graph that `backward` will need."""

    @abstractmethod
    def output(self, part: str, *inputs: Tensor) -> Any:
        """What a part that this client holds gives for these inputs, with its graph, in training mode.

        Any loss of it may be taken and differentiated; `step` then trains the part.
        """

    @abstractmethod
    def auxiliary_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """The auxiliary's estimate of z_b. If this client trains its auxiliary, that gets gradients too."""

    @abstractmethod
    def server_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """z_b through this client's own copy of the server part."""

    @abstractmethod
    def head_gradient(self, features: Smash, target: Mapping[str, Tensor]) -> Smash:
        """The gradient of the loss with respect to what the S-server sent for this client's head (U-shape)."""

    @abstractmethod
    def backward(self, z: Smash, gradient: Smash) -> None:
        """Backpropagate z_b into the client-side model (Algorithm 1: J_c z_b)."""

    @abstractmethod
    def step(self) -> None:
        """One optimizer step of every part that this client trains."""

    @abstractmethod
    def parameters(self, part: str) -> Mapping[str, Tensor]:
        """The trained weights of a part, with their gradients between `backward` and `step`."""

    @abstractmethod
    def replace(self, part: str, tensors: Tensors) -> None:
        """Take over weights of its own for a part that is not averaged, such as a newly aligned auxiliary."""


class SServerRole(Protocol):
    """The S-server between and during rounds."""

    round: int
    left: list[tuple[int, Message]]
    """Messages of this round for clients that do not wait for them."""
    extra: Tensors
    """What an algorithm keeps at the S-server from round to round."""

    @abstractmethod
    def begin(self, t: int) -> None:
        """Round t starts."""

    @abstractmethod
    def learn(self, client: int, smashed: Message, *, cut_gradient: bool = False, own_copy: bool = False) -> Smash:
        """One optimizer step on an upload (Algorithm 3, lines 5-6). Returns z_b if asked for, else nothing.

        With `own_copy` the client has a server-side model of its own until `average_copies` (SplitFed-MS).
        """

    @abstractmethod
    def forward(self, client: int, smashed: Message, *, own_copy: bool = False) -> Smash:
        """The first half of a step in a U-shape: what the client's head needs. `backward` is the second."""

    @abstractmethod
    def backward(self, client: int, gradients: Message) -> Smash:
        """The second half: backpropagate the gradients of the client's head, take the step, and return z_b."""

    @abstractmethod
    def average_copies(self) -> None:
        """Put the mean of the clients' own server-side models in their place."""

    @abstractmethod
    def drop(self, client: int) -> None:
        """A client has failed in this round: its own server-side model and its open step are forgotten."""

    @abstractmethod
    def remember(self, client: int, smashed: Message) -> None:
        """Store an upload in the client's alignment dataset (Algorithm 3, line 7)."""

    @abstractmethod
    def remembered(self) -> list[int]:
        """The clients that have uploaded for their alignment dataset, in order."""

    @abstractmethod
    def align(self, clients: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """Align the auxiliaries with the server (equation 3) on these clients' uploads; yield each for its client."""

    @abstractmethod
    def set_auxiliary(self, tensors: Tensors) -> None:
        """An auxiliary that the F-server has averaged: every client's, until it gets one of its own."""

    @abstractmethod
    def weights(self) -> Tensors:
        """The server-side model x_s."""

    @abstractmethod
    def recalibrated(self) -> Tensors:
        """The server-side model with BatchNorm statistics estimated anew from the stored uploads."""

    @abstractmethod
    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """How well the auxiliaries in use estimate the cut gradients of some newest uploads."""

    @abstractmethod
    def take_loss(self) -> float | None:
        """The mean loss of the steps since the last call; None if there were none."""

    @abstractmethod
    def remarks(self) -> dict[str, Any]:
        """Of this round, for the metrics: whether an auxiliary was aligned, and why others were not."""

    @abstractmethod
    def state(self) -> Tensors:
        """A flat dict for a checkpoint; between rounds."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left, whatever has happened since."""


class FServerRole(Protocol):
    """The F-server, as an algorithm's `aggregate` sees it."""

    weights: dict[str, Tensors]
    """The averaged weights by part, as they were before this round's updates."""
    client_weights: Sequence[float]
    """How much each client counts: its number of examples, or 1."""
    extra: Tensors
    """What an algorithm keeps at the F-server from round to round (a server optimizer's state, say)."""
    sends: dict[str, Tensors]
    """What goes to the clients with the averaged weights, by kind (control variates, say)."""

    @abstractmethod
    def mean(self, updates: Sequence[Update]) -> dict[str, Tensors]:
        """x_c^{t+1}, the weighted mean (Algorithm 2, line 7), or another average by --averaging.rule, by part."""

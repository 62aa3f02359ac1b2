"""What the roles can do, as an algorithm sees them.

An algorithm is written against these protocols alone. The roles that compute and the dry ones, which know shapes only,
implement the same protocols, so mypy finds a method that one of them lacks.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.alignment.passes import Smash
from fsl_sage.problems.base import Batch
from fsl_sage.roles.footprint import Footprint
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
    footprint: Footprint | None = None
    """What its first step took, if that was measured. It is told to the experiment, not sent to the F-server."""

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
    def batches(self, t: int, steps: range | None = None) -> Iterator[Batch]:
        """The mini-batches of round t: E epochs in random order, or K steps; of these local steps alone if given."""

    @abstractmethod
    def own_examples(self) -> Iterator[Batch]:
        """All examples of this client once, in their order and as they are: not shuffled, not augmented.

        Each batch counts as one more step of the round.
        """

    @abstractmethod
    def forward(self, batch: Batch) -> Smash:
        """z_f, the smashed data, with the graph that `backward` will need."""

    @abstractmethod
    def output(self, part: str, *inputs: Tensor) -> Any:
        """What a part that this client holds gives for these inputs, with its graph, in training mode.

        Any loss of it may be taken and differentiated; `step` then trains the part.
        """

    @abstractmethod
    def infer(self, batch: Batch, part: str) -> tuple[Smash, Any]:
        """z_f, and what a part behind the cut gives for it: in evaluation mode, without a graph."""

    @abstractmethod
    def task_loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """The task's mean loss of an output, with its graph. It counts in the metrics."""

    @abstractmethod
    def minimise(self, loss: Tensor) -> None:
        """Backpropagate any loss, and take one optimizer step of every part that this client trains."""

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
    def gradient(self, part: str, z: Smash, loss: Callable[[Any], Tensor]) -> Smash:
        """The gradient with respect to z of any loss of a part's output; a part that is trained gets gradients too.

        The loss counts in the metrics.
        """

    @abstractmethod
    def backward(self, z: Smash, gradient: Smash) -> None:
        """Backpropagate z_b into the client-side model (Algorithm 1: J_c z_b)."""

    @abstractmethod
    def step(self, **lr: float) -> None:
        """One optimizer step of every part that this client trains; by part, a learning rate that is not `lr()`."""

    @abstractmethod
    def lr(self) -> float:
        """The learning rate of the batch at hand."""

    @abstractmethod
    def loss(self, batch: Batch, part: str, *, leaves_trace: bool = True) -> tuple[Smash, Tensor]:
        """z_f and the loss through a part behind the cut, in training mode, without a graph.

        With `leaves_trace` the pass moves running statistics and its loss counts in the metrics, as in a step.
        Dropout is the same in all passes of a batch.
        """

    @abstractmethod
    def direction(self) -> Tensor:
        """u, a random direction of length 1 over all weights that this client trains, [d]: one for each step.

        It has the parts in the order of `Algorithm.holds`, and the weights of each in that of `parameters`.
        """

    @abstractmethod
    def moved(self, u: Tensor, by: float) -> AbstractContextManager[None]:
        """Within it the weights are moved along u; afterwards they are what they were, to the bit."""

    @abstractmethod
    def move(self, u: Tensor, by: float | Tensor) -> None:
        """Move the weights along u for good."""

    @abstractmethod
    def parameters(self, part: str) -> Mapping[str, Tensor]:
        """The trained weights of a part, with their gradients between `backward` and `step`."""

    @abstractmethod
    def replace(self, part: str, tensors: Tensors) -> None:
        """Take over weights of its own for a part that is not averaged, such as a newly aligned auxiliary."""

    @abstractmethod
    def optimizer_state(self, part: str) -> Tensors:
        """What the optimizer of a part that this client trains remembers, by "weight's name/entry"."""

    @abstractmethod
    def set_optimizer_state(self, part: str, state: Tensors) -> None:
        """Put another state in the place of that of a part's optimizer; the learning rate is not part of it."""


class SServerRole(Protocol):
    """The S-server between and during rounds."""

    round: int
    left: list[tuple[int, Message]]
    """Messages of this round for clients that do not wait for them."""
    extra: Tensors
    """What an algorithm keeps at the S-server from round to round."""
    client_weights: Sequence[float]
    """How much each client counts: its number of examples, or 1."""

    @abstractmethod
    def begin(self, t: int) -> None:
        """Round t starts."""

    @abstractmethod
    def learn(self, client: int, smashed: Message, *, cut_gradient: bool = False, own_copy: bool = False) -> Smash:
        """One optimizer step on an upload (Algorithm 3, lines 5-6). Returns z_b if asked for, else nothing.

        With `own_copy` the client has a server-side model of its own until `average_copies` (SplitFed-MS).
        """

    @abstractmethod
    def join(self, client: int, smashed: Message, share: float) -> Smash:
        """Add `share` times the gradient of an upload's mean loss to the next `step`; returns z_b of that mean loss.

        Every upload passes the model by itself, so BatchNorm sees the clients' batches apart.
        """

    @abstractmethod
    def step(self, step: int) -> None:
        """One optimizer step on all that was joined; `step` is the local step that the learning rate goes by."""

    @abstractmethod
    def terms(self, smashed: Message) -> int:
        """The number of loss terms (samples, or tokens) over which the mean loss of an upload is taken."""

    @abstractmethod
    def forward(self, client: int, smashed: Message, *, own_copy: bool = False) -> Smash:
        """The first half of a step in a U-shape: what the client's head needs. `backward` is the second."""

    @abstractmethod
    def backward(self, client: int, gradients: Message) -> Smash:
        """The second half: backpropagate the gradients of the client's head, take the step, and return z_b."""

    @abstractmethod
    def join_backward(self, client: int, gradients: Message, share: float) -> Smash:
        """The second half, as part of a joint step: it relates to `backward` as `join` does to `learn`."""

    @abstractmethod
    def output(self, *z: Tensor, leaves_trace: bool = True) -> Any:
        """What the server part gives for smashed data, with its graph, in training mode.

        With `leaves_trace` the pass moves running statistics, as in a step.
        """

    @abstractmethod
    def infer(self, *z: Tensor) -> Any:
        """The same in evaluation mode, without a graph."""

    @abstractmethod
    def task_loss(self, output: Any, target: Mapping[str, Tensor], *, counts: bool = True) -> Tensor:
        """The task's mean loss of an output, with its graph; whether it counts in the metrics."""

    @abstractmethod
    def join_loss(self, loss: Tensor) -> None:
        """Add the gradient of any loss to the next `step`."""

    @abstractmethod
    def minimise(self, loss: Tensor, share: float) -> None:
        """Backpropagate any loss and take one optimizer step; `share` of the round's steps, 0 to 1, lie before it."""

    @abstractmethod
    def keep(self, client: int, upload: Message) -> None:
        """Keep an upload until `take_kept`, which an algorithm calls before the round is over."""

    @abstractmethod
    def take_kept(self) -> dict[int, list[Message]]:
        """By client, in order, the uploads that were kept. They are forgotten."""

    @abstractmethod
    def average_copies(self) -> None:
        """Put the mean of the clients' own server-side models in their place."""

    @abstractmethod
    def drop(self, client: int) -> None:
        """A client has failed in this round: its own server-side model, open step and kept uploads are forgotten."""

    @abstractmethod
    def remember(self, client: int, smashed: Message) -> None:
        """Store an upload in the client's alignment dataset (Algorithm 3, line 7)."""

    @abstractmethod
    def remembered(self) -> list[int]:
        """The clients that have uploaded for their alignment dataset, in order."""

    @abstractmethod
    def drifted(self, below: float, every: int) -> list[int]:
        """The clients, of those remembered, whose auxiliaries are to be aligned because they have drifted.

        Those are auxiliaries whose fidelity on uploads that no alignment has seen is below `below`, unless one of the
        last `every` - 1 rounds aligned them. A pooled auxiliary is judged by the mean, and is that of all clients.
        """

    @abstractmethod
    def align(self, clients: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """Align the auxiliaries with the server (equation 3) on these clients' uploads; yield each for its client."""

    @abstractmethod
    def set_auxiliary(self, tensors: Tensors) -> None:
        """An auxiliary that the F-server has averaged: every client's, until it gets one of its own."""

    @abstractmethod
    def set_weights(self, tensors: Tensors) -> None:
        """Put other weights into the server-side model; the optimizer's state stays."""

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
    def watched(self) -> AbstractContextManager[None]:
        """While an algorithm's code runs at the S-server: its first step is measured."""

    @abstractmethod
    def footprint(self) -> Footprint | None:
        """What that step took; None if there was none."""

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

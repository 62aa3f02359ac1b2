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
    """A client during one round.

    `Smash` is a tuple with one tensor [B, *cut] for each boundary tensor of the cut: the smashed data z_f, their
    gradients z_b, and in a U-shape the features that the S-server sends. B is the size of the batch. `target` holds
    what the loss needs besides the output, by name, such as the labels [B]. A part is "client", "auxiliary", "server",
    "head" or "decoder".
    """

    id: int
    round: int
    step_index: int
    """The number of the current batch in the round, from 0."""
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
        """The mini-batches of a round, in random order: E epochs, or K steps.

        Args:
            t: The round.
            steps: Only the batches of these local steps; all of them if not given.
        """

    @abstractmethod
    def own_examples(self) -> Iterator[Batch]:
        """Batches of all examples of this client, each once, neither shuffled nor augmented.

        Each batch counts as one more step of the round.
        """

    @abstractmethod
    def forward(self, batch: Batch) -> Smash:
        """The smashed data z_f of a batch, with the graph that `backward` needs."""

    @abstractmethod
    def output(self, part: str, *inputs: Tensor) -> Any:
        """The output of a part in training mode, with its graph.

        An algorithm may compute any loss of it and differentiate it; `step` then trains the part.

        Args:
            part: A part that this client holds.
            inputs: What the part takes: for a part behind the cut the tensors of z_f, [B, *cut] each.

        Returns:
            The part's output, for a classifier logits [B, C].
        """

    @abstractmethod
    def infer(self, batch: Batch, part: str) -> tuple[Smash, Any]:
        """Returns z_f of a batch and the output of `part` for it, in evaluation mode and without a graph."""

    @abstractmethod
    def task_loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """The task's mean loss of an output, a scalar with its graph. It counts in the metrics."""

    @abstractmethod
    def minimise(self, loss: Tensor) -> None:
        """Backpropagate a scalar loss and take one optimizer step of every part that this client trains."""

    @abstractmethod
    def auxiliary_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """The auxiliary's estimate of z_b for z_f. An auxiliary that this client trains gets gradients too."""

    @abstractmethod
    def server_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """z_b for z_f, from this client's own copy of the server part."""

    @abstractmethod
    def head_gradient(self, features: Smash, target: Mapping[str, Tensor]) -> Smash:
        """U-shape: the gradient of the loss with respect to the features that the S-server sent for the head."""

    @abstractmethod
    def gradient(self, part: str, z: Smash, loss: Callable[[Any], Tensor]) -> Smash:
        """The gradient of any loss with respect to z. A part that is trained gets gradients too.

        Args:
            part: A part behind the cut.
            z: The smashed data z_f.
            loss: From the part's output to a scalar, which counts in the metrics.
        """

    @abstractmethod
    def take_hold(self) -> None:
        """Let the client part's weights of this moment be those by which `held` measures; they are kept over rounds."""

    @abstractmethod
    def held(self, batch: Batch, z: Smash, gradient: Smash, strength: float) -> Smash:
        """An estimate of z_b with a pull of z towards z_0, what the weights of the last `take_hold` give for the batch.

        Added is strength (z - z_0) / rms(z_0)^2 over the number of loss terms. The first call takes hold itself, if
        nothing has before.
        """

    @abstractmethod
    def backward(self, z: Smash, gradient: Smash) -> None:
        """Backpropagate z_b (`gradient`) from z_f (`z`) into the client-side model (Algorithm 1: J_c z_b)."""

    @abstractmethod
    def step(self, **lr: float) -> None:
        """Take one optimizer step of every part that this client trains.

        Args:
            lr: By part, a learning rate to take instead of `lr()`.
        """

    @abstractmethod
    def lr(self) -> float:
        """The learning rate of the current step."""

    @abstractmethod
    def loss(self, batch: Batch, part: str, *, leaves_trace: bool = True) -> tuple[Smash, Tensor]:
        """Returns z_f of a batch and the loss of `part` for it, in training mode and without a graph.

        Dropout is the same in all passes of a batch.

        Args:
            batch: The batch.
            part: A part behind the cut.
            leaves_trace: Whether the pass updates running statistics and its loss counts in the metrics, as in a step.
        """

    @abstractmethod
    def direction(self) -> Tensor:
        """A random unit vector u [d] over the d weights that this client trains, a new one for each step.

        The parts are in the order of `Algorithm.holds`, and the weights of each in that of `parameters`.
        """

    @abstractmethod
    def moved(self, u: Tensor, by: float) -> AbstractContextManager[None]:
        """A context in which the weights are moved by `by` times u [d]. Afterwards they are exactly as before."""

    @abstractmethod
    def move(self, u: Tensor, by: float | Tensor) -> None:
        """Move the weights by `by` times u [d]."""

    @abstractmethod
    def parameters(self, part: str) -> Mapping[str, Tensor]:
        """The trained weights of a part by name. Between `backward` and `step` they have gradients."""

    @abstractmethod
    def replace(self, part: str, tensors: Tensors) -> None:
        """Set the weights of a part that is not averaged, such as a newly aligned auxiliary."""

    @abstractmethod
    def optimizer_state(self, part: str) -> Tensors:
        """The state of the optimizer of a part that this client trains: `WEIGHT/ENTRY` to tensor."""

    @abstractmethod
    def set_optimizer_state(self, part: str, state: Tensors) -> None:
        """Replace the state of a part's optimizer by one that `optimizer_state` returned. It has no learning rate."""


class SServerRole(Protocol):
    """The S-server between and during rounds.

    An upload is a message with z_f (`Message.smashed`), the target, and the value `step`, the client's local step.
    """

    round: int
    left: list[tuple[int, Message]]
    """Messages of this round for clients that do not wait for them."""
    replied: dict[int, Message]
    """By client, what it has from a reply of this round and keeps beyond it: lost if the client fails."""
    extra: Tensors
    """What an algorithm keeps at the S-server from round to round."""
    client_weights: Sequence[float]
    """How much each client counts: its number of examples, or 1."""

    @abstractmethod
    def begin(self, t: int) -> None:
        """Start round t."""

    @abstractmethod
    def learn(self, client: int, smashed: Message, *, cut_gradient: bool = False, own_copy: bool = False) -> Smash:
        """Take one optimizer step on an upload (Algorithm 3, lines 5-6).

        Args:
            client: The client that sent it.
            smashed: The upload.
            cut_gradient: Whether to return z_b.
            own_copy: Whether the client has a server-side model of its own until `average_copies` (SplitFed-MS).

        Returns:
            z_b, [B, *cut] each, if asked for; else an empty tuple.
        """

    @abstractmethod
    def join(self, client: int, smashed: Message, share: float) -> Smash:
        """Add `share` times the gradient of an upload's mean loss to the next `step`.

        Every upload passes through the model alone, so BatchNorm sees the clients' batches separately.

        Returns:
            z_b of the upload's mean loss, not multiplied by `share`.
        """

    @abstractmethod
    def step(self, step: int) -> None:
        """Take one optimizer step on all that was joined. `step` is the local step, which sets the learning rate."""

    @abstractmethod
    def terms(self, smashed: Message) -> int:
        """The number of loss terms of an upload, samples or tokens, over which its mean loss is taken."""

    @abstractmethod
    def forward(self, client: int, smashed: Message, *, own_copy: bool = False) -> Smash:
        """U-shape, first half of a step: returns the features for the client's head. `backward` is the second."""

    @abstractmethod
    def backward(self, client: int, gradients: Message) -> Smash:
        """U-shape, second half: backpropagate the gradients of the features, take the step, and return z_b."""

    @abstractmethod
    def join_backward(self, client: int, gradients: Message, share: float) -> Smash:
        """U-shape, second half in a joint step: as `backward`, with `share` as in `join` and without the step."""

    @abstractmethod
    def output(self, *z: Tensor, leaves_trace: bool = True) -> Any:
        """The server part's output for smashed data in training mode, with its graph.

        Args:
            z: The tensors of z_f, [B, *cut] each.
            leaves_trace: Whether the pass updates running statistics, as in a step.
        """

    @abstractmethod
    def infer(self, *z: Tensor) -> Any:
        """The server part's output for smashed data in evaluation mode, without a graph."""

    @abstractmethod
    def task_loss(self, output: Any, target: Mapping[str, Tensor], *, counts: bool = True) -> Tensor:
        """The task's mean loss of an output, a scalar with its graph. With `counts` it counts in the metrics."""

    @abstractmethod
    def join_loss(self, loss: Tensor) -> None:
        """Add the gradient of a scalar loss to the next `step`."""

    @abstractmethod
    def minimise(self, loss: Tensor, share: float) -> None:
        """Backpropagate a scalar loss and take one optimizer step.

        Args:
            loss: The loss.
            share: The share of the round's steps that were taken before, 0 to 1. It sets the learning rate.
        """

    @abstractmethod
    def keep(self, client: int, upload: Message) -> None:
        """Keep an upload until `take_kept`, which must be called in the same round."""

    @abstractmethod
    def take_kept(self) -> dict[int, list[Message]]:
        """Returns the kept uploads by client, in order, and forgets them."""

    @abstractmethod
    def fold_copy(self, client: int, cohort: Sequence[int]) -> None:
        """Let go of the own server-side model of a client whose round is over. It counts in `average_copies`.

        Args:
            client: Its number; ascending from call to call.
            cohort: All clients of the round, ascending: before `average_copies` each of them is folded.
        """

    @abstractmethod
    def average_copies(self) -> None:
        """Replace the clients' own server-side models by their average."""

    @abstractmethod
    def drop(self, client: int) -> None:
        """Forget the server-side model, open step and kept uploads of a client that failed in this round."""

    @abstractmethod
    def remember(self, client: int, smashed: Message, gradients: Smash = ()) -> None:
        """Store an upload in the client's alignment dataset (Algorithm 3, line 7).

        A ridge auxiliary needs its z_b too: it keeps sums in the place of uploads.
        """

    @abstractmethod
    def remembered(self) -> list[int]:
        """The clients that have an alignment dataset, in order."""

    @abstractmethod
    def drifted(self, below: float, every: int) -> list[int]:
        """The remembered clients whose auxiliaries have drifted and should be aligned.

        A pooled auxiliary is judged by the mean fidelity. It has drifted for all clients or for none.

        Args:
            below: An auxiliary has drifted if its cosine on uploads that no alignment has seen is below this.
            every: An auxiliary that was aligned in the last `every` - 1 rounds is left alone.
        """

    @abstractmethod
    def align(self, clients: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """Align the auxiliaries with the server (equation 3) on these clients' uploads; yield each for its client."""

    @abstractmethod
    def set_auxiliary(self, tensors: Tensors) -> None:
        """Take over an auxiliary that the F-server has averaged. Every client has it until it gets one of its own."""

    @abstractmethod
    def set_weights(self, tensors: Tensors) -> None:
        """Set the weights of the server-side model. The optimizer's state stays."""

    @abstractmethod
    def weights(self) -> Tensors:
        """The weights and buffers of the server-side model x_s, by name."""

    @abstractmethod
    def recalibrated(self) -> Tensors:
        """As `weights`, with BatchNorm statistics that are estimated from the stored uploads."""

    @abstractmethod
    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """How well the auxiliaries estimate the cut gradients of the newest uploads of some clients.

        Args:
            seen: On uploads that the last alignment has seen, instead of on others.

        Returns:
            The mean; None if there are no such uploads.
        """

    @abstractmethod
    def watched(self) -> AbstractContextManager[None]:
        """A context for the algorithm's code at the S-server. Its first step is measured."""

    @abstractmethod
    def footprint(self) -> Footprint | None:
        """Memory and operations of that step; None before it."""

    @abstractmethod
    def take_loss(self) -> float | None:
        """The mean loss of the steps since the last call; None if there were none."""

    @abstractmethod
    def remarks(self) -> dict[str, Any]:
        """Metrics of this round: whether an auxiliary was aligned, and why others were not."""

    @abstractmethod
    def state(self) -> Tensors:
        """The state as a flat dict, for a checkpoint between rounds."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. All else is forgotten."""


class FServerRole(Protocol):
    """The F-server, as an algorithm's `aggregate` sees it."""

    weights: dict[str, Tensors]
    """The averaged weights by part, as they were before this round's updates."""
    client_weights: Sequence[float]
    """How much each client counts: its number of examples, or 1."""
    extra: Tensors
    """What an algorithm keeps at the F-server from round to round, such as an optimizer's state."""
    sends: dict[str, Tensors]
    """What goes to the clients with the averaged weights, by kind, such as control variates."""

    @abstractmethod
    def mean(self, updates: Sequence[Update]) -> dict[str, Tensors]:
        """The new weights by part: x_c^{t+1}, the weighted mean (Algorithm 2, line 7), or --averaging.rule's."""

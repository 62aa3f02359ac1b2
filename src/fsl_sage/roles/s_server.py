"""The S-server: holds the server-side model, learns from uploads, and aligns the auxiliaries."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.alignment.passes import Smash, gradients_of
from fsl_sage.models.norm import in_training, without_trace
from fsl_sage.roles.auxiliaries import Auxiliaries
from fsl_sage.roles.copies import Copies, Loss
from fsl_sage.roles.extra import kept
from fsl_sage.roles.footprint import Footprint, Meter, held_by, static_bytes
from fsl_sage.roles.protocols import Parts, SServerRole
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.schedule import Schedule
from fsl_sage.roles.server_jobs import SpreadOver, recalibrate
from fsl_sage.roles.work import Settings, Workbench, boundary, mean_loss
from fsl_sage.split import detached_leaves, with_gradients
from fsl_sage.wire.message import Message, Tensors
from fsl_sage.wire.paths import below, by_client, flat


class SServer(SServerRole):
    """The S-server between and during rounds."""

    def __init__(
        self,
        settings: Settings,
        workbench: Workbench,
        initial: Parts,
        client_weights: Sequence[float],
        spread: SpreadOver,
        cuts: Sequence[str] = (),
    ) -> None:
        """`cuts`: that of each client, where they differ; the workbench has slots for what follows each of them."""
        self._cuts = cuts
        self._settings = settings
        self._workbench = workbench
        self._initial = initial
        self._spread = spread
        self.client_weights = client_weights
        self._lr: Schedule = settings.server_schedule()
        self._meter = Meter()
        self._most_static = 0
        self._start()

    def _start(self) -> None:
        """As before round 0."""
        self.extra: Tensors = {}
        self.losses: list[Loss] = []
        self.round = -1
        slots, initial = self._workbench.slots["server"], self._initial
        self._model = Replica(slots, initial["server"], self._settings.optimizer_of("server"))
        self._behind = {cut: self._model.seen_by(self._workbench.slots[cut]) for cut in dict.fromkeys(self._cuts)}
        """Where clients have cuts of their own: by cut, x_s from there on."""
        self._joined: list[int] = []
        """The clients whose uploads were joined since the last step."""
        self._copies = Copies(self._settings)
        self._open: dict[int, tuple[Replica, Smash, Smash]] = {}
        self.auxiliaries = Auxiliaries(self._settings, self._workbench, initial.get("auxiliary", {}), self._spread)
        self._forget_round()

    def begin(self, t: int) -> None:
        """Round t starts, or another group of its clients."""
        if t != self.round:
            self.round = t
            self._forget_round()

    def _forget_round(self) -> None:
        self.auxiliaries.forget_round()
        self.left: list[tuple[int, Message]] = []
        self.replied: dict[int, Message] = {}
        self._kept: dict[int, list[Message]] = {}
        self._outputs = 0
        """The passes of this round that an algorithm asked for."""

    # Learning

    def learn(self, client: int, smashed: Message, *, cut_gradient: bool = False, own_copy: bool = False) -> Smash:
        """One optimizer step on an upload (Algorithm 3, lines 5-6). Returns z_b if asked for, else nothing.

        With `own_copy` the client has a server-side model of its own until `average_copies` (SplitFed-MS).
        """
        replica = self._copy(client) if own_copy else self._model
        gradients = self._pass(replica, client, smashed, cut_gradient=cut_gradient)
        self._step(replica, int(smashed.values["step"]))
        return gradients

    def join(self, client: int, smashed: Message, share: float) -> Smash:
        """Add `share` times the gradient of an upload's mean loss to the next `step`; returns z_b of that mean loss.

        Every upload passes the model by itself, so BatchNorm sees the clients' batches apart.
        """
        self._joined.append(client)
        with self._model.adding(share):
            behind = self._behind[self._cuts[client]] if self._cuts else self._model
            return self._pass(behind, client, smashed, cut_gradient=True)

    def step(self, step: int) -> None:
        """One optimizer step on all that was joined; `step` is the local step that the learning rate goes by."""
        joined, self._joined = self._joined, []
        if self._cuts:
            self._weigh(joined)
        self._step(self._model, step)

    def _step(self, replica: Replica, step: int) -> None:
        self._meter.found_gradients([replica])
        replica.step(self._lr(self.round, step))
        self._meter.end()

    def _weigh(self, joined: Sequence[int]) -> None:
        """Let each weight step on the mean over the clients that it served, where these are not all who joined."""
        served = Counter(name for client in joined for name in self._behind[self._cuts[client]].parameters())
        for name, weight in self._model.parameters().items():
            if weight.grad is not None and served[name] < len(joined):
                weight.grad.mul_(len(joined) / served[name])

    def terms(self, smashed: Message) -> int:
        """The number of loss terms over which the mean loss of an upload is taken."""
        return self._settings.task.terms(smashed.target)

    def _pass(self, replica: Replica, client: int, smashed: Message, *, cut_gradient: bool) -> Smash:
        step = int(smashed.values["step"])
        self._settings.seed_forward("dropout-s-server", client, self.round, step)
        gradients, loss = self._settings.passes.learn(
            replica.module(), smashed.smashed, smashed.target, cut_gradient=cut_gradient
        )
        self.losses.append((client, step, loss))
        return gradients

    def forward(self, client: int, smashed: Message, *, own_copy: bool = False) -> Smash:
        """The first half of a step in a U-shape: what the client's head needs. `backward` is the second.

        Other clients' steps may come in between. They change weights in place, so a shared model's pass is recorded
        with a copy of the weights as they are now, whose gradients the model will get.
        """
        replica = self._copy(client) if own_copy else self._model.snapshot()
        step = int(smashed.values["step"])
        self._settings.seed_forward("dropout-s-server", client, self.round, step)
        inputs = detached_leaves(smashed.smashed)
        with self._settings.passes.autocast():
            features = boundary(in_training(replica.module())(*inputs))
        self._open[client] = replica, inputs, features
        return tuple(tensor.detach() for tensor in features)

    def backward(self, client: int, gradients: Message) -> Smash:
        """The second half: backpropagate the gradients of the client's head, take the step, and return z_b."""
        replica, inputs = self._backward(client, gradients)
        if replica not in self._copies.replicas():
            self._model.take_gradients(replica)
            replica = self._model
        self._step(replica, int(gradients.values["step"]))
        return gradients_of(inputs)

    def join_backward(self, client: int, gradients: Message, share: float) -> Smash:
        """The second half, as part of a joint step: it relates to `backward` as `join` does to `learn`."""
        with self._model.adding(share):
            replica, inputs = self._backward(client, gradients)
            self._model.take_gradients(replica)
        return gradients_of(inputs)

    def _backward(self, client: int, gradients: Message) -> tuple[Replica, Smash]:
        replica, inputs, features = self._open.pop(client)
        replica.module()  # for blocks that are checkpointed
        torch.autograd.backward(*with_gradients(features, gradients.cut_gradients))
        return replica, inputs

    def output(self, *z: Tensor, leaves_trace: bool = True) -> Any:
        """What the server part gives for smashed data, with its graph, in training mode."""
        self._settings.seed_forward("dropout-s-server-output", -1, self.round, self._outputs)
        self._outputs += 1
        module = in_training(self._model.module())
        trace = nullcontext() if leaves_trace else without_trace(module)
        with trace, self._settings.passes.autocast():
            return module(*z)

    @torch.no_grad()
    def infer(self, *z: Tensor) -> Any:
        """The same in evaluation mode, without a graph."""
        with self._settings.passes.autocast():
            return self._model.module().eval()(*z)

    def task_loss(self, output: Any, target: Mapping[str, Tensor], *, counts: bool = True) -> Tensor:
        """The task's mean loss of an output, with its graph; whether it counts in the metrics."""
        loss = self._settings.task.loss(output, target)
        if counts:
            self.losses.append((-1, 0, loss.detach()))
        return loss

    def join_loss(self, loss: Tensor) -> None:
        """Add the gradient of any loss to the next `step`."""
        torch.autograd.backward(loss)

    def minimise(self, loss: Tensor, share: float) -> None:
        """Backpropagate any loss and take one optimizer step; `share` of the round's steps, 0 to 1, lie before it."""
        torch.autograd.backward(loss)
        self.step(int(share * self._lr.steps + 1e-9))  # a third of 3 steps is 1, whatever the last bit of a third

    def keep(self, client: int, upload: Message) -> None:
        """Keep an upload until `take_kept`, which an algorithm calls before the round is over."""
        self._kept.setdefault(client, []).append(upload)

    def take_kept(self) -> dict[int, list[Message]]:
        """By client, in order, the uploads that were kept. They are forgotten."""
        kept, self._kept = self._kept, {}
        return dict(sorted(kept.items()))

    def _copy(self, client: int) -> Replica:
        if client not in self._copies:
            self._meter.holds(held_by([self._copies.make(client, self._model)]))
        return self._copies[client]

    def drop(self, client: int) -> None:
        """A client has failed in this round: its own server-side model, open step and kept uploads are forgotten.

        What it was sent in a reply is lost with it, and waits for it to come back.
        """
        self._kept.pop(client, None)
        self._copies.drop(client)
        self._open.pop(client, None)
        if client in self.replied:
            self.left.append((client, self.replied.pop(client)))

    def fold_copy(self, client: int, cohort: Sequence[int]) -> None:
        """Add the copy of a client whose round is over to the average of the cohort's, and forget it."""
        self._copies.fold(client, [self.client_weights[each] for each in cohort])

    def average_copies(self) -> None:
        """Replace the clients' own server-side models by their average."""
        self._most_static = max(self._most_static, self._static_bytes())
        self.set_weights(self._copies.take_average(self.client_weights, self._model.weights()))

    def weights(self) -> Tensors:
        """The server-side model x_s."""
        return self._model.weights()

    def set_weights(self, tensors: Tensors) -> None:
        """Put other weights into the server-side model; the optimizer's state stays."""
        self._model.set_weights(tensors)

    # Alignment

    def remember(self, client: int, smashed: Message, gradients: Smash = ()) -> None:
        """Store an upload in the client's alignment dataset (Algorithm 3, line 7); for a ridge auxiliary, its z_b."""
        whole = tuple(gradient * self.terms(smashed) for gradient in gradients)
        self.auxiliaries.remember(client, smashed, whole)

    def remembered(self) -> list[int]:
        """The clients that have uploaded for their alignment dataset, in order."""
        return sorted(self.auxiliaries.data)

    def set_auxiliary(self, tensors: Tensors) -> None:
        """An auxiliary that the F-server has averaged: every client's, until it gets one of its own."""
        # Statistics that stay local do not travel, and passes with batch statistics do not read them.
        self.auxiliaries.common = {**self.auxiliaries.common, **tensors}

    def align(self, clients: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """Align the auxiliaries with the server (equation 3) on these clients' uploads, and yield each for its client.

        A pooled auxiliary is for every client, also for one that has not yet taken part.
        """
        return self.auxiliaries.align(list(clients), self.round, self.weights())

    def drifted(self, below: float, every: int) -> list[int]:
        """The clients whose auxiliaries have drifted, and were not aligned in the last rounds."""
        return self.auxiliaries.drifted(below, every, self.round, self.weights())

    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """How well the auxiliaries in use estimate the cut gradients of clients' newest uploads.

        On uploads that the last alignment has not seen, or on those that it has. A few clients are drawn for it.
        """
        return self.auxiliaries.fidelity(self.round, self.weights(), seen=seen)

    def recalibrated(self) -> Tensors:
        """The server-side model with BatchNorm statistics estimated anew from the stored uploads."""
        uploads = [upload for _, data in sorted(self.auxiliaries.data.items()) for upload in data]
        (tensors,) = self._spread(recalibrate, self.weights(), [uploads])
        return tensors

    # What is told

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While an algorithm's code runs at the S-server; its first step, up to the optimizer's, is measured."""
        with self._meter.watching():
            self._meter.begin(held_by([self._model]))
            yield

    def footprint(self) -> Footprint | None:
        """What that step took; None if there was none. The static bytes are those of all server-side models."""
        if not self._meter.is_done:
            return None
        static = max(self._most_static, self._static_bytes())
        return Footprint(static, self._meter.working_bytes, self._meter.flops)

    def _static_bytes(self) -> int:
        held = static_bytes([self._model, *self._copies.replicas()], self._meter.gradient_bytes)
        return held + self._copies.resting_bytes()

    def take_loss(self) -> float | None:
        """The mean loss of the steps since the last call; None if there were none."""
        losses, self.losses = self._copies.in_order(self.losses), []
        return mean_loss([loss for *_, loss in losses]) if losses else None

    def remarks(self) -> dict[str, Any]:
        """Of this round, for the metrics: whether an auxiliary was aligned, and why others were not."""
        skipped = self.auxiliaries.skipped
        return {"aligned": self.auxiliaries.aligned, **({"alignment_skipped": dict(skipped)} if skipped else {})}

    # Checkpoints

    def state(self) -> Tensors:
        """A flat dict for a checkpoint; between rounds."""
        own = {
            "model": self._model.weights(),
            "optimizer": self._model.optimizer_state(),
            "extra": kept(self.extra, "server"),
        }
        copies = {str(client): tensors for client, tensors in self._copies.optimizers.items()}
        return flat(own) | flat(copies, "copies/") | self.auxiliaries.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left, whatever has happened since."""
        self._start()
        self.set_weights(below("model/", state))
        self._model.load_optimizer_state(below("optimizer/", state))
        self.extra = below("extra/", state)
        self._copies.optimizers = by_client(below("copies/", state))
        self.auxiliaries.load_state(state)

"""The S-server: holds the server-side model, learns from uploads, and aligns the auxiliaries."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsl_sage.alignment.dataset import AlignmentData, Measure, Upload, make_room, tokens_in
from fsl_sage.alignment.fidelity import CLIENTS, SAMPLES, Fidelity, mean
from fsl_sage.alignment.passes import Smash, gradients_of
from fsl_sage.alignment.regression import Sums
from fsl_sage.models.norm import untouched_statistics
from fsl_sage.roles.copies import Copies
from fsl_sage.roles.footprint import Footprint, Meter, held_by, static_bytes
from fsl_sage.roles.protocols import Parts, SServerRole
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.schedule import Schedule
from fsl_sage.roles.server_jobs import (
    POOLED,
    Aligned,
    Alignment,
    SpreadOver,
    align_one,
    fidelity_one,
    fit_one,
    recalibrate,
)
from fsl_sage.roles.work import Settings, Workbench, boundary, mean_loss
from fsl_sage.seeding import numpy_generator
from fsl_sage.split import Ridge, detached_leaves, random_features
from fsl_sage.wire.message import AUXILIARY, Message, Tensors
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
        self._fits = random_features(settings.config.model.auxiliary) is not None
        """Whether an alignment fits a ridge auxiliary by its sums, and trains none."""
        self._lr: Schedule = settings.server_schedule()
        self._meter = Meter()
        self._most_static = 0
        self._start()

    def _start(self) -> None:
        """As before round 0."""
        self.alignment: dict[int, AlignmentData] = {}
        """The alignment dataset of every client that has uploaded for it."""
        self.extra: Tensors = {}
        self.losses: list[Tensor] = []
        self.round = -1
        self._forget_round()
        slots, initial = self._workbench.slots["server"], self._initial
        self._model = Replica(slots, initial["server"], self._settings.optimizer_of("server"))
        self._behind = {cut: self._model.seen_by(self._workbench.slots[cut]) for cut in dict.fromkeys(self._cuts)}
        """Where clients have cuts of their own: by cut, x_s from there on."""
        self._joined: list[int] = []
        """The clients whose uploads were joined since the last step."""
        self._copies = Copies(self._settings)
        self._open: dict[int, tuple[Replica, Smash, Smash]] = {}
        self._auxiliary: Tensors = initial.get("auxiliary", {})
        """That of every client that has none of its own: the initial one, the F-server's average, or a pooled one."""
        self._aligned: dict[int, Tensors] = {}
        self._alignment_optimizers: dict[int, Tensors] = {}
        self._aligned_in: dict[int, int] = {}
        """By client, or for POOLED, the last round that aligned its auxiliary."""
        self._seen: set[int] = set()
        """The clients whose newest upload an alignment has seen."""
        self._sums: dict[int, Sums] = {}
        """Of a ridge auxiliary: by client, or for POOLED, what all uploads have told."""
        self._uploads = 0
        """How many have come to alignment datasets that share their room."""

    def begin(self, t: int) -> None:
        """Round t starts, or another group of its clients."""
        if t != self.round:
            self.round = t
            self._forget_round()

    def _forget_round(self) -> None:
        self.aligned = False
        """Whether an auxiliary was aligned in this round."""
        self.skipped: dict[str, str] = {}
        """By client ("pooled" for the one of all), why an alignment of this round gave nothing."""
        self.left: list[tuple[int, Message]] = []
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
        self._settings.seed_forward("dropout-s-server", client, self.round, int(smashed.values["step"]))
        gradients, loss = self._settings.passes.learn(
            replica.module(), smashed.smashed, smashed.target, cut_gradient=cut_gradient
        )
        self.losses.append(loss)
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
            features = boundary(replica.module().train()(*inputs))
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
        roots = [tensor for tensor in features if tensor.requires_grad]
        torch.autograd.backward(roots, list(gradients.cut_gradients))
        return replica, inputs

    def output(self, *z: Tensor, leaves_trace: bool = True) -> Any:
        """What the server part gives for smashed data, with its graph, in training mode."""
        self._settings.seed_forward("dropout-s-server-output", -1, self.round, self._outputs)
        self._outputs += 1
        module = self._model.module().train()
        trace = nullcontext() if leaves_trace else untouched_statistics(module)
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
            self.losses.append(loss.detach())
        return loss

    def join_loss(self, loss: Tensor) -> None:
        """Add the gradient of any loss to the next `step`."""
        torch.autograd.backward(loss)

    def minimise(self, loss: Tensor, share: float) -> None:
        """Backpropagate any loss and take one optimizer step; `share` of the round's steps, 0 to 1, lie before it."""
        torch.autograd.backward(loss)
        self.step(int(share * self._lr.steps))

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
        """A client has failed in this round: its own server-side model, open step and kept uploads are forgotten."""
        self._kept.pop(client, None)
        self._copies.drop(client)
        self._open.pop(client, None)

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
        """Store an upload in the client's alignment dataset (Algorithm 3, line 7).

        For a ridge auxiliary its z_b is added to the sums, and of the upload only what measures fidelity is stored.
        """
        ridge = self._ridge
        if ridge is not None and gradients:
            config = self._settings.config.alignment
            owner = POOLED if config.scope == "pooled" else client
            if owner not in self._sums:
                self._sums[owner] = Sums.nothing(ridge, self._settings.device)
            whole = gradients[0] * self.terms(smashed)
            self._sums[owner].add(ridge, smashed.smashed, smashed.target, whole, config.forgetting)
        self._store(client, smashed)
        self._seen.discard(client)

    @property
    def _ridge(self) -> Ridge | None:
        """The ridge auxiliary, where that is the auxiliary; its weights may be anybody's."""
        if not self._fits:
            return None
        module = self._workbench.slots["auxiliary"].module
        assert isinstance(module, Ridge)
        return module

    def _capacity(self) -> int:
        """How many samples of a client are stored; as many as come where tokens are counted."""
        config = self._settings.config.alignment
        if self._fits:
            return min(SAMPLES, config.samples)
        return config.samples if config.tokens is None else 2**62

    def _store(self, client: int, smashed: Message) -> None:
        data = self.alignment.setdefault(client, AlignmentData(self._capacity()))
        data.add(smashed)
        if (room := self._common_room()) is not None:
            data.number(self._uploads)
            self._uploads += 1
            make_room(self.alignment, *room)

    def _common_room(self) -> tuple[int, Measure] | None:
        """What the datasets of all clients may take together, and how it is measured; None if that bounds nothing."""
        config, clients = self._settings.config.alignment, self._settings.config.clients
        if self._fits:
            return None
        if config.tokens is not None:
            return config.tokens, tokens_in
        return (config.total_samples, len) if clients * config.samples > config.total_samples else None

    def remembered(self) -> list[int]:
        """The clients that have uploaded for their alignment dataset, in order."""
        return sorted(self.alignment)

    def auxiliary_of(self, client: int) -> Tensors:
        """The auxiliary that a client uses, as far as the S-server knows."""
        return self._aligned.get(client, self._auxiliary)

    def set_auxiliary(self, tensors: Tensors) -> None:
        """An auxiliary that the F-server has averaged: every client's, until it gets one of its own."""
        self._auxiliary = tensors

    def align(self, clients: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """Align the auxiliaries with the server (equation 3) on these clients' uploads, and yield each for its client.

        A pooled auxiliary is for every client, also for one that has not yet taken part. An alignment that gives
        nothing usable leaves the auxiliary as it was and is named in `skipped`.
        """
        clients = list(clients)
        if not clients:
            return
        pooled = self._settings.config.alignment.scope == "pooled"
        owners = [POOLED] if pooled else clients
        if self._fits:
            results = self._spread(fit_one, None, [self._sums[owner] for owner in owners])
        else:
            uploads = {client: list(self.alignment[client]) for client in clients}
            if pooled:
                uploads = {POOLED: [upload for own in uploads.values() for upload in own]}
            items = [self._alignment(owner, uploads[owner]) for owner in owners]
            results = self._spread(align_one, (self.round, self.weights()), items)
        self._seen |= set(clients)
        for owner, result in zip(owners, results, strict=True):
            yield from self._take_over(owner, result)

    def _alignment(self, client: int, uploads: list[Upload]) -> Alignment:
        start = self._auxiliary if client == POOLED else self.auxiliary_of(client)
        return Alignment(client, start, self._alignment_optimizers.get(client, {}), uploads)

    def _take_over(self, client: int, result: Aligned | str) -> Iterator[tuple[int, Message]]:
        if isinstance(result, str):
            self.skipped["pooled" if client == POOLED else str(client)] = result
            return
        self.aligned = True
        self._aligned_in[client] = self.round
        if result.optimizer:
            self._alignment_optimizers[client] = result.optimizer
        held = self._auxiliary if client == POOLED else self.auxiliary_of(client)
        message = aligned_auxiliary(self._settings, client, self.round, result.auxiliary, held)
        # The S-server goes on with what the client has, not with what coding has lost of it.
        published = dict(message.parts[AUXILIARY])
        if client == POOLED:
            self._auxiliary = published
        else:
            self._aligned[client] = published
        receivers = range(self._settings.config.clients) if client == POOLED else [client]
        yield from ((receiver, message) for receiver in receivers)

    def drifted(self, below: float, every: int) -> list[int]:
        """The clients whose auxiliaries have drifted, and were not aligned in the last rounds."""
        if self._settings.config.alignment.scope == "pooled":
            found = self.fidelity() if self._may_align(POOLED, every) else None
            return self.remembered() if found is not None and found.cosine < below else []
        clients = [client for client in self.remembered() if client not in self._seen]
        clients = [client for client in clients if self._may_align(client, every)]
        found_by_client = zip(clients, self._fidelities(clients), strict=True)
        return [client for client, found in found_by_client if found is not None and found.cosine < below]

    def _may_align(self, client: int, every: int) -> bool:
        return client not in self._aligned_in or self.round - self._aligned_in[client] >= every

    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """How well the auxiliaries in use estimate the cut gradients of clients' newest uploads.

        On uploads that the last alignment has not seen, or on those that it has. A few clients are drawn for it.
        """
        clients = [client for client in sorted(self.alignment) if (client in self._seen) == seen]
        draw = numpy_generator(self._settings.config.seed, "fidelity", round=self.round)
        drawn = sorted(draw.permutation(clients)[:CLIENTS].tolist())
        return mean(self._fidelities(drawn)) if drawn else None

    def _fidelities(self, clients: Sequence[int]) -> list[Fidelity | None]:
        """Of the auxiliaries of these clients, each on the last samples of its newest upload."""
        items = [(self.auxiliary_of(client), self.alignment[client].newest().last(SAMPLES)) for client in clients]
        return self._spread(fidelity_one, self.weights(), items) if items else []

    def recalibrated(self) -> Tensors:
        """The server-side model with BatchNorm statistics estimated anew from the stored uploads."""
        uploads = [upload for _, data in sorted(self.alignment.items()) for upload in data]
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
        losses, self.losses = self.losses, []
        return mean_loss(losses) if losses else None

    def remarks(self) -> dict[str, Any]:
        """Of this round, for the metrics: whether an auxiliary was aligned, and why others were not."""
        return {"aligned": self.aligned, **({"alignment_skipped": dict(self.skipped)} if self.skipped else {})}

    # Checkpoints

    def state(self) -> Tensors:
        """A flat dict for a checkpoint; between rounds."""
        state = flat(
            {
                "model": self._model.weights(),
                "optimizer": self._model.optimizer_state(),
                "auxiliary": self._auxiliary,
                "extra": self.extra,
            }
        )
        state["seen"] = torch.tensor(sorted(self._seen), dtype=torch.int64)
        if self._aligned_in:
            state["aligned_in"] = torch.tensor(sorted(self._aligned_in.items()), dtype=torch.int64)
        groups: dict[str, Mapping[int, Tensors]] = {
            "copies": self._copies.optimizers,
            "aligned": self._aligned,
            "alignment_optimizers": self._alignment_optimizers,
            "alignment": {client: data.state() for client, data in self.alignment.items()},
            "sums": {owner: sums.state() for owner, sums in self._sums.items()},
        }
        if self._uploads:
            state["uploads"] = torch.tensor(self._uploads)
        for group, own in groups.items():
            state |= flat({str(client): tensors for client, tensors in own.items()}, f"{group}/")
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left, whatever has happened since."""
        self._start()
        self.set_weights(below("model/", state))
        self._model.load_optimizer_state(below("optimizer/", state))
        self._auxiliary = below("auxiliary/", state)
        self.extra = below("extra/", state)
        self._copies.optimizers = by_client(below("copies/", state))
        self._aligned = by_client(below("aligned/", state))
        self._alignment_optimizers = by_client(below("alignment_optimizers/", state))
        self._seen = set(state["seen"].tolist())
        self._aligned_in = dict(state["aligned_in"].tolist()) if "aligned_in" in state else {}
        for client, tensors in by_client(below("alignment/", state)).items():
            self.alignment[client] = AlignmentData(self._capacity())
            self.alignment[client].load_state(tensors)
        self._sums = {owner: Sums(**own) for owner, own in by_client(below("sums/", state)).items()}
        self._uploads = int(state["uploads"]) if "uploads" in state else 0


def aligned_auxiliary(settings: Settings, client: int, t: int, aligned: Tensors, held: Tensors) -> Message:
    """The message of an auxiliary to those who have the one before it: as they decode it, and what is sent."""
    change = settings.codecs.published.get(AUXILIARY)
    if change is None:
        return Message({AUXILIARY: aligned})
    noise = settings.codecs.noise(AUXILIARY, client, t)
    sent = change.encode(aligned, held, {}, settings.trained["auxiliary"], noise)
    return Message({AUXILIARY: sent.decoded}, changes={AUXILIARY: sent.arrays})

"""The S-server: holds the server-side model, learns from uploads, and aligns the auxiliaries."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsl_sage.alignment.dataset import AlignmentData, Upload
from fsl_sage.alignment.fidelity import Fidelity, fidelity, mean
from fsl_sage.alignment.matching import align
from fsl_sage.alignment.passes import Smash
from fsl_sage.config import AlignmentConfig
from fsl_sage.roles.averaging import average
from fsl_sage.roles.client import below
from fsl_sage.roles.optimizers import Schedule
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.work import Parts, Settings, Workbench, boundary
from fsl_sage.seeding import generator
from fsl_sage.wire.message import AUXILIARY, Message, Tensors

Job = Callable[[Workbench, Settings, Any, Any], Any]
"""A plain function of a worker's modules, the settings, what all calls share, and one item; it may run anywhere."""

SpreadOver = Callable[[Job, Any, Sequence[Any]], list[Any]]
"""Calls a job with what is shared and each item, side by side where there are workers; results in order."""


class SServer:
    """The S-server between and during rounds."""

    def __init__(
        self,
        settings: Settings,
        workbench: Workbench,
        initial: Parts,
        client_weights: Sequence[float],
        spread: SpreadOver,
    ) -> None:
        self.alignment: dict[int, AlignmentData] = {}
        """The alignment dataset of every client that has uploaded for it."""
        self.round = 0
        self.losses: list[Tensor] = []
        self._settings = settings
        self._workbench = workbench
        self._spread = spread
        self._client_weights = client_weights
        self._lr: Schedule = settings.server_schedule()
        self._model = Replica(workbench.slots["server"], initial["server"], settings.make_optimizer)
        self._copies: dict[int, Replica] = {}
        self._open: dict[int, tuple[Replica, list[Tensor], Smash]] = {}
        self._copy_optimizers: dict[int, Tensors] = {}
        self._auxiliary = initial.get("auxiliary", {})
        self._aligned: dict[int, Tensors] = {}

    # Learning

    def learn(self, client: int, smashed: Message, *, cut_gradient: bool = False, own_copy: bool = False) -> Smash:
        """One optimizer step on an upload (Algorithm 3, lines 5-6). Returns z_b if asked for, else nothing.

        With `own_copy` the client has a server-side model of its own until `average_copies` (SplitFed-MS).
        """
        replica = self._copy(client) if own_copy else self._model
        step = int(smashed.values["step"])
        self._settings.seed_forward("dropout-s-server", client, self.round, step)
        gradients, loss = self._settings.passes.learn(
            replica.module(), smashed.smashed, smashed.target, cut_gradient=cut_gradient
        )
        replica.step(self._lr(self.round, step))
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
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in smashed.smashed]
        with self._settings.passes.autocast():
            features = boundary(replica.module().train()(*leaves))
        self._open[client] = replica, leaves, features
        return tuple(tensor.detach() for tensor in features)

    def backward(self, client: int, gradients: Message) -> Smash:
        """The second half: backpropagate the gradients of the client's head, take the step, and return z_b."""
        replica, leaves, features = self._open.pop(client)
        roots = [tensor for tensor in features if tensor.requires_grad]
        torch.autograd.backward(roots, list(gradients.cut_gradients))
        if replica is not self._copies.get(client):
            self._model.take_gradients(replica)
            replica = self._model
        replica.step(self._lr(self.round, int(gradients.values["step"])))
        return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)

    def _copy(self, client: int) -> Replica:
        if client not in self._copies:
            slots = self._workbench.slots["server"]
            copy = Replica(slots, self._model.weights(), self._settings.make_optimizer)
            copy.load_optimizer_state(self._copy_optimizers.get(client, {}))
            self._copies[client] = copy
        return self._copies[client]

    def average_copies(self) -> None:
        """Put the mean of the clients' own server-side models in their place; their optimizer states stay theirs."""
        clients = sorted(self._copies)
        states = [self._copies[client].weights() for client in clients]
        self.set_weights(average(states, [self._client_weights[client] for client in clients]))
        for client in clients:
            self._copy_optimizers[client] = self._copies.pop(client).optimizer_state()

    def weights(self) -> Tensors:
        """The server-side model x_s."""
        return self._model.weights()

    def set_weights(self, tensors: Tensors) -> None:
        """Put other weights into the server-side model; the optimizer's state stays."""
        with torch.no_grad():
            for name, tensor in self._model.tensors.items():
                tensor.copy_(tensors[name])

    # Alignment

    def remember(self, client: int, smashed: Message) -> None:
        """Store an upload in the client's alignment dataset (Algorithm 3, line 7)."""
        samples = self._settings.config.alignment.samples
        self.alignment.setdefault(client, AlignmentData(samples)).add(smashed)

    def auxiliary_of(self, client: int) -> Tensors:
        """The auxiliary that a client uses, as far as the S-server knows."""
        return self._aligned.get(client, self._auxiliary)

    def set_auxiliary(self, tensors: Tensors) -> None:
        """An auxiliary that the F-server has averaged: every client's, until it gets one of its own."""
        self._auxiliary = tensors

    def align(self, clients: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """Align the auxiliaries with the server (equation 3) and yield each for its client."""
        clients = list(clients)
        shared = (self.round, self.weights())
        if self._settings.config.alignment.scope == "pooled":
            pooled = [upload for client in clients for upload in self.alignment[client]]
            (tensors,) = self._spread(_align_one, shared, [(-1, self.auxiliary_of(clients[0]), pooled)])
            results = [tensors] * len(clients)
        else:
            items = [(client, self.auxiliary_of(client), list(self.alignment[client])) for client in clients]
            results = self._spread(_align_one, shared, items)
        for client, tensors in zip(clients, results, strict=True):
            self._aligned[client] = tensors
            yield client, Message({AUXILIARY: tensors})

    def fidelity(self) -> Fidelity | None:
        """How well the auxiliaries in use estimate the cut gradients, on each client's newest upload."""
        items = [(self.auxiliary_of(client), data.newest()) for client, data in sorted(self.alignment.items())]
        return mean(self._spread(_fidelity_one, self.weights(), items)) if items else None

    # Checkpoints

    def state(self) -> Tensors:
        """A flat dict for a checkpoint; between rounds."""
        state = {f"model/{name}": x for name, x in self._model.weights().items()}
        state |= {f"optimizer/{name}": x for name, x in self._model.optimizer_state().items()}
        state |= {f"auxiliary/{name}": x for name, x in self._auxiliary.items()}
        groups: dict[str, Mapping[int, Tensors]] = {
            "copies": self._copy_optimizers,
            "aligned": self._aligned,
            "alignment": {client: data.state() for client, data in self.alignment.items()},
        }
        for group, by_client in groups.items():
            for client, tensors in by_client.items():
                state |= {f"{group}/{client}/{name}": x for name, x in tensors.items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left."""
        self.set_weights(below("model/", state))
        self._model.load_optimizer_state(below("optimizer/", state))
        self._auxiliary = below("auxiliary/", state)
        self._copy_optimizers = by_client(below("copies/", state))
        self._aligned = by_client(below("aligned/", state))
        for client, tensors in by_client(below("alignment/", state)).items():
            self.alignment[client] = AlignmentData(self._settings.config.alignment.samples)
            self.alignment[client].load_state(tensors)


def _align_one(
    workbench: Workbench,
    settings: Settings,
    shared: tuple[int, Tensors],
    item: tuple[int, Tensors, Sequence[Upload]],
) -> Tensors:
    """Align one auxiliary; shared are the round and the server-side model."""
    (t, model), (client, start, uploads) = shared, item
    config: AlignmentConfig = settings.config.alignment
    server = Replica(workbench.slots["server"], model, None)
    if config.start == "server":
        start = _overlay(start, server.slots.frozen() | model)
    auxiliary = Replica(workbench.slots["auxiliary"], start, settings.make_optimizer)
    order = generator(settings.config.seed, "alignment", client, t)
    align(auxiliary.module(), server.module(), uploads, settings.passes, config, order)
    return auxiliary.weights()


def _fidelity_one(workbench: Workbench, settings: Settings, model: Tensors, item: tuple[Tensors, Upload]) -> Fidelity:
    """The fidelity of one auxiliary to the server-side model, on one upload."""
    auxiliary = Replica(workbench.slots["auxiliary"], item[0], None)
    server = Replica(workbench.slots["server"], model, None)
    return fidelity(auxiliary.module(), server.module(), item[1], settings.passes)


def by_client(state: Mapping[str, Tensor]) -> dict[int, Tensors]:
    """Group a flat dict whose paths start with a client's number."""
    groups: dict[int, Tensors] = {}
    for path, tensor in state.items():
        client, rest = path.split("/", 1)
        groups.setdefault(int(client), {})[rest] = tensor
    return groups


def _overlay(tensors: Tensors, other: Tensors) -> Tensors:
    """`tensors` with those of `other` that have the same name and shape."""
    return {n: other[n] if n in other and other[n].shape == x.shape else x for n, x in tensors.items()}

"""The client: holds data and the client-side model, and takes the local steps."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsl_sage.alignment.passes import Smash
from fsl_sage.config import Config
from fsl_sage.problems.base import Batch
from fsl_sage.problems.batches import batch_indices, batch_sizes
from fsl_sage.roles.corrections import follow_controls, pull
from fsl_sage.roles.protocols import ClientRole, Parts
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.work import Chain, Settings, Workbench, boundary
from fsl_sage.seeding import generator
from fsl_sage.wire.message import Tensors
from fsl_sage.wire.paths import below


class Client(ClientRole):
    """A client during one round, made from its state and the weights that came down.

    Its state is one flat dict of tensors: `optimizer/PART/WEIGHT/ENTRY`, `own/PART/NAME` for weights that are not
    averaged (its auxiliary, local BatchNorm statistics), and `extra/NAME` for what an algorithm adds.
    """

    def __init__(
        self,
        id: int,
        examples: Tensor,
        settings: Settings,
        workbench: Workbench,
        received: Parts,
        initial: Parts,
        state: Mapping[str, Tensor],
        trains: tuple[str, ...],
        received_extra: Mapping[str, Tensors] | None = None,
        averaged: tuple[str, ...] = (),
    ) -> None:
        self.id = id
        self.examples = examples
        self.received = received
        self.received_extra = received_extra or {}
        self.extra = below("extra/", state)
        self.round = self.step_index = -1
        self.losses: list[Tensor] = []
        self.lr_used = 0.0
        self._settings = settings
        self._workbench = workbench
        self._lr = settings.client_schedule()
        self._own: dict[str, Tensors] = {part: below(f"own/{part}/", state) for part in initial}
        self._parts: dict[str, Replica] = {}
        self._corrected = tuple(part for part in averaged if part in trains)
        for part, tensors in initial.items():
            weights = {**tensors, **received.get(part, {}), **self._own[part]}
            replica = Replica(workbench.slots[part], weights, settings.optimizer_of(part) if part in trains else None)
            if part in trains:
                replica.load_optimizer_state(below(f"optimizer/{part}/", state))
            self._parts[part] = replica

    def batches(self, t: int) -> Iterator[Batch]:
        """The mini-batches of round t: E epochs in random order, or K steps."""
        config = self._settings.config
        self.round = t
        for step, indices in enumerate(local_order(len(self.examples), config, self.id, t)):
            self.step_index = step
            augmentation = generator(config.seed, "augment", self.id, t, step)
            chosen = self.examples[indices]
            yield replace(self._settings.task.training_batch(chosen, augmentation), examples=chosen)

    def forward(self, batch: Batch) -> Smash:
        """z_f, the smashed data, with the graph that `backward` will need."""
        module = self._parts["client"].module().train()
        self._settings.seed_forward("dropout-client", self.id, self.round, self.step_index)
        with self._settings.passes.autocast():
            output = module(**batch.inputs) if isinstance(batch.inputs, Mapping) else module(batch.inputs)
        return boundary(output)

    def output(self, part: str, *inputs: Tensor) -> Any:
        """What a part that this client holds gives for these inputs, with its graph, in training mode."""
        module = self._parts[part].module().train()
        self._settings.seed_forward(f"dropout-{part}", self.id, self.round, self.step_index)
        with self._settings.passes.autocast():
            return module(*inputs)

    def auxiliary_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """The auxiliary's estimate of z_b. If this client trains its auxiliary, that gets gradients too."""
        return self._gradient("auxiliary", z, target)

    def server_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """z_b through this client's own copy of the server part (FedAvg)."""
        return self._gradient("server", z, target)

    def head_gradient(self, features: Smash, target: Mapping[str, Tensor]) -> Smash:
        """The gradient of the loss with respect to what the S-server sent for this client's head (U-shape)."""
        return self._gradient("head", features, target)

    def _gradient(self, part: str, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        replica, passes = self._parts[part], self._settings.passes
        self._settings.seed_forward(f"dropout-{part}", self.id, self.round, self.step_index)
        through = passes.learn if replica.optimizer else passes.cut_gradient
        module = replica.module()
        if part == "server" and "head" in self._parts:
            module = Chain(module, self._parts["head"].module())
        gradients, loss = through(module, z, target)
        self.losses.append(loss)
        return gradients

    def backward(self, z: Smash, gradient: Smash) -> None:
        """Backpropagate z_b into the client-side model (Algorithm 1: J_c z_b)."""
        torch.autograd.backward([tensor for tensor in z if tensor.requires_grad], list(gradient))

    def step(self) -> None:
        """One optimizer step of every part that this client trains."""
        lr = self._lr(self.round, self.step_index)
        options = self._settings.config.averaging
        if options.proximal:
            pull(self, options.proximal, self._corrected)
        for replica in self._parts.values():
            if replica.optimizer is not None:
                replica.step(lr)
        if options.control_variates:
            follow_controls(self, lr, self._corrected)
        self.lr_used += lr

    def parameters(self, part: str) -> Mapping[str, Tensor]:
        """The trained weights of a part, with their gradients between `backward` and `step`."""
        return self._parts[part].parameters()

    def replace(self, part: str, tensors: Tensors) -> None:
        """Take over weights of its own for a part that is not averaged, such as a newly aligned auxiliary.

        Where this client trains that part, the optimizer's state stays.
        """
        if self._parts[part].optimizer is not None:
            self._parts[part].set_weights(tensors)
            return
        self._own[part] = tensors
        self._parts[part] = Replica(self._workbench.slots[part], tensors, None)

    def upload(self, parts: tuple[str, ...]) -> dict[str, Tensors]:
        """The weights that go to the F-server."""
        return {part: self._settings.travelling(part, self._parts[part].weights()) for part in parts}

    def state(self, averaged: tuple[str, ...]) -> Tensors:
        """What this client keeps for its next round, beside the weights that are averaged: one flat dict."""
        state = {f"extra/{name}": tensor for name, tensor in self.extra.items()}
        for part, replica in self._parts.items():
            state |= {f"optimizer/{part}/{path}": tensor for path, tensor in replica.optimizer_state().items()}
            own = self._own[part]
            if replica.optimizer is not None:
                weights = replica.weights()
                travels = self._settings.travelling(part, weights) if part in averaged else {}
                own = {name: tensor for name, tensor in weights.items() if name not in travels}
            state |= {f"own/{part}/{name}": tensor for name, tensor in own.items()}
        return state


def local_order(examples: int, config: Config, client: int, t: int) -> Iterator[Tensor]:
    """For each local step of a client's round t, the places of its examples among its own."""
    epoch, left = 0, config.local_steps
    while epoch < config.local_epochs if left is None else left > 0:
        shuffle = generator(config.seed, "order", client, t, epoch)
        for indices in batch_indices(examples, config.batch_size, shuffle)[:left]:
            yield indices
            left = None if left is None else left - 1
        epoch += 1


def local_batch_sizes(examples: int, config: Config) -> list[int]:
    """The sizes of the batches that a client with so many examples takes in a round."""
    epoch = batch_sizes(examples, config.batch_size)
    if config.local_steps is None:
        return epoch * config.local_epochs
    return (epoch * -(-config.local_steps // len(epoch)))[: config.local_steps]

"""The client: holds data and the client-side model, and takes the local steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.alignment.passes import Smash, gradients_of
from fsl_sage.config import Config
from fsl_sage.models.norm import in_training, without_trace
from fsl_sage.problems.base import Batch
from fsl_sage.problems.batches import batch_indices, batch_sizes
from fsl_sage.roles.corrections import copies_kept, follow_controls, pull
from fsl_sage.roles.extra import kept
from fsl_sage.roles.footprint import Footprint, Meter, held_by, static_bytes
from fsl_sage.roles.protocols import ClientRole, Parts
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.work import Chain, Settings, Workbench, boundary
from fsl_sage.seeding import generator
from fsl_sage.split import detached_leaves, rms, with_gradients
from fsl_sage.wire.message import Tensors, nbytes
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
        self.places: Tensor | None = None
        """The places of the current batch's examples among the client's own, int64 [B]."""
        self.losses: list[Tensor] = []
        self.lr_used = 0.0
        self.meter = Meter()
        self._settings = settings
        self._workbench = workbench
        self._lr = settings.client_schedule()
        self._own: dict[str, Tensors] = {part: below(f"own/{part}/", state) for part in initial}
        self._parts: dict[str, Replica] = {}
        self._averaged = averaged
        self.corrected = tuple(part for part in averaged if part in trains)
        """The averaged parts that it trains, which FedProx and SCAFFOLD correct."""
        for part, tensors in initial.items():
            slots = workbench.slots[part]
            weights = {**tensors, **slots.only(received.get(part, {})), **self._own[part]}
            replica = Replica(slots, weights, settings.optimizer_of(part) if part in trains else None)
            if part in trains and settings.keeps_optimizer(averaged=part in averaged):
                replica.load_optimizer_state(below(f"optimizer/{part}/", state))
            self._parts[part] = replica

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """Its weights and optimizers by part."""
        return self._parts

    def batches(self, t: int, steps: range | None = None) -> Iterator[Batch]:
        """The mini-batches of round t: E epochs in random order, or K steps; of these local steps alone if given."""
        config = self._settings.config
        self.round = t
        for step, indices in chosen_steps(local_order(len(self.examples), config, self.id, t), steps):
            self.step_index, self.places = step, indices
            augmentation = generator(config.seed, "augment", self.id, t, step)
            chosen = self.examples[indices]
            yield from self._step_on(replace(self._settings.task.training_batch(chosen, augmentation), examples=chosen))

    def own_examples(self) -> Iterator[Batch]:
        """All examples of this client once, in their order and as they are; each batch is one more step."""
        everyone = torch.arange(len(self.examples))
        for places in torch.split(everyone, self._settings.config.batch_size):
            self.step_index, self.places = self.step_index + 1, places
            chosen = self.examples[places]
            yield from self._step_on(replace(self._settings.task.plain_batch(chosen), examples=chosen))

    def _step_on(self, batch: Batch) -> Iterator[Batch]:
        """Start the next step. It lasts until the next batch is asked for."""
        given = [batch]
        del batch  # so that it is let go where the algorithm lets it go, not only at the next step
        self.meter.begin(held_by(self._parts.values()))
        yield given.pop()
        self.meter.end()

    def footprint(self) -> Footprint | None:
        """Memory and operations of the step that was measured; None if none was."""
        if not self.meter.is_done:
            return None
        static = static_bytes(self._parts.values(), self.meter.gradient_bytes) + nbytes(below(HELD, self.extra))
        corrected = sum(nbytes(self._parts[part].parameters()) for part in self.corrected)
        static += copies_kept(self._settings.config.averaging) * corrected
        return Footprint(static, self.meter.working_bytes, self.meter.flops)

    def forward(self, batch: Batch) -> Smash:
        """z_f, the smashed data, with the graph that `backward` will need."""
        self._settings.seed_forward("dropout-client", self.id, self.round, self.step_index)
        return self._smashed(in_training(self._parts["client"].module()), batch)

    def _smashed(self, module: nn.Module, batch: Batch) -> Smash:
        with self._settings.passes.autocast():
            return boundary(module(**batch.inputs) if isinstance(batch.inputs, Mapping) else module(batch.inputs))

    @torch.no_grad()
    def infer(self, batch: Batch, part: str) -> tuple[Smash, Any]:
        """z_f, and what a part behind the cut gives for it: in evaluation mode, without a graph."""
        client, behind = (self._parts[name].module().eval() for name in ("client", part))
        with self.meter.without_graph(batch.inputs):
            z = self._smashed(client, batch)
            with self._settings.passes.autocast():
                return z, behind(*z)

    def task_loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """The task's mean loss of an output, with its graph. It counts in the metrics."""
        loss = self._settings.task.loss(output, target)
        self.losses.append(loss.detach())
        return loss

    def minimise(self, loss: Tensor) -> None:
        """Backpropagate any loss, and take one optimizer step of every part that this client trains."""
        for replica in self._parts.values():
            replica.module()  # as in `backward`
        torch.autograd.backward(loss)
        self.step()

    def output(self, part: str, *inputs: Tensor) -> Any:
        """What a part that this client holds gives for these inputs, with its graph, in training mode."""
        module = in_training(self._parts[part].module())
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
        if loss is not None:
            self.losses.append(loss)
        return gradients

    def gradient(self, part: str, z: Smash, loss: Callable[[Any], Tensor]) -> Smash:
        """The gradient with respect to z of any loss of a part's output; a part that is trained gets gradients too."""
        inputs = detached_leaves(z)
        value = loss(self.output(part, *inputs))
        torch.autograd.backward(value)
        self.losses.append(value.detach())
        return gradients_of(inputs)

    def take_hold(self) -> None:
        """Keep the client part's trained weights of this moment, from round to round: a second copy of them."""
        own = self._parts["client"].parameters()
        self.extra |= {f"{HELD}{name}": weight.detach().clone() for name, weight in own.items()}

    def held(self, batch: Batch, z: Smash, gradient: Smash, strength: float) -> Smash:
        """An estimate of z_b with a pull of z towards z_0: one more forward pass, without a graph.

        The pass has the dropout of the batch and leaves running statistics alone, so where the weights have not moved,
        z_0 is z to the bit.
        """
        if not (weights := below(HELD, self.extra)):
            self.take_hold()
            weights = below(HELD, self.extra)
        before = Replica(self._workbench.slots["client"], {**self._parts["client"].weights(), **weights}, None)
        module = in_training(before.module())
        with torch.no_grad(), without_trace(module):
            self._settings.seed_forward("dropout-client", self.id, self.round, self.step_index)
            z_0 = self._smashed(module, batch)
        share = strength / self._settings.task.terms(batch.target)
        pairs = [(now, then) for now, then in zip(z, z_0, strict=True) if now.is_floating_point()]
        return tuple(g + share * _pull(*pair).to(g.dtype) for g, pair in zip(gradient, pairs, strict=True))

    def backward(self, z: Smash, gradient: Smash) -> None:
        """Backpropagate z_b into the client-side model (Algorithm 1: J_c z_b)."""
        self._parts["client"].module()  # checkpointed blocks run forward once more, with the weights that are in it
        torch.autograd.backward(*with_gradients(z, gradient))

    def step(self, **lr: float) -> None:
        """One optimizer step of every part that this client trains; by part, a learning rate that is not `lr()`."""
        options = self._settings.config.averaging
        if options.proximal:
            pull(self, options.proximal, self.corrected)
        self.meter.found_gradients(self._trained())
        for part, replica in self._parts.items():
            if replica.optimizer is not None:
                replica.step(lr.get(part, self.lr()))
        if options.control_variates:
            follow_controls(self, self.lr(), self.corrected)
        self.lr_used += self.lr()

    def lr(self) -> float:
        """The learning rate of the batch at hand."""
        return self._lr(self.round, self.step_index)

    def _trained(self) -> list[Replica]:
        return [replica for replica in self._parts.values() if replica.optimizer is not None]

    def rest(self, place: Callable[[int], Tensor | None]) -> None:
        """Move weights and what optimizers remember to other memory of the CPU, if there is some; no graph may be open.

        Args:
            place: Takes a number of bytes and gives that memory, uint8; or None, and all stays where it is.
        """
        if self._settings.device.type != "cpu":
            return
        held = [tensor for replica in self._trained() for tensor in replica.held()]
        memory = place(sum(_aligned(tensor.nbytes) for tensor in held))
        if memory is not None:
            room = _Room(memory)
            for replica in self._trained():
                replica.move(room.copied)

    # Steps without a backward pass

    @torch.no_grad()
    def loss(self, batch: Batch, part: str, *, leaves_trace: bool = True) -> tuple[Smash, Tensor]:
        """z_f and the loss through a part behind the cut, in training mode, without a graph."""
        task, passes = self._settings.task, self._settings.passes
        behind = in_training(self._parts[part].module())
        with ExitStack() as stack:
            for module in () if leaves_trace else (self._parts["client"].module(), behind):
                stack.enter_context(without_trace(module))
            stack.enter_context(self.meter.without_graph(batch.inputs, batch.target))
            z = self.forward(batch)
            self._settings.seed_forward(f"dropout-{part}", self.id, self.round, self.step_index)
            stack.enter_context(passes.autocast())
            loss = task.loss(task.output(behind, z, batch.target), batch.target)
        if leaves_trace:
            self.losses.append(loss)
        return z, loss

    def direction(self) -> Tensor:
        """u, a random direction of length 1 over all weights that this client trains, [d]: one for each step."""
        weights = self._weights()
        draw = generator(self._settings.config.seed, "direction", self.id, self.round, self.step_index)
        with self.meter.without_graph():
            normal = torch.randn(sum(weight.numel() for weight in weights), generator=draw, dtype=torch.float32)
            normal = normal.to(weights[0])  # in float32, so that it is the same for every precision
            return normal / torch.linalg.vector_norm(normal)

    @contextmanager
    def moved(self, u: Tensor, by: float) -> Iterator[None]:
        """Within it the weights are moved along u; afterwards they are what they were, to the bit."""
        with self.meter.without_graph():
            before = [weight.detach().clone() for weight in self._weights()]
        self.move(u, by)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, old in zip(self._weights(), before, strict=True):
                    weight.copy_(old)

    @torch.no_grad()
    def move(self, u: Tensor, by: float | Tensor) -> None:
        """Move the weights along u for good."""
        weights = self._weights()
        pieces = torch.split(u, [weight.numel() for weight in weights])
        with self.meter.without_graph():
            for weight, piece in zip(weights, pieces, strict=True):
                weight.add_(by * piece.view(weight.shape))

    def _weights(self) -> list[nn.Parameter]:
        """All weights that this client trains, part by part."""
        return [weight for replica in self._trained() for weight in replica.parameters().values()]

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
        self.meter.holds(held_by([self._parts[part]]))

    def optimizer_state(self, part: str) -> Tensors:
        """What the optimizer of a part that this client trains remembers, by "weight's name/entry"; not copied."""
        return self._parts[part].optimizer_state()

    def set_optimizer_state(self, part: str, state: Tensors) -> None:
        """Replace the state of a part's optimizer. The state is copied, because steps change it in place."""
        self._parts[part].load_optimizer_state({path: tensor.clone() for path, tensor in state.items()})

    def upload(self, parts: tuple[str, ...]) -> dict[str, Tensors]:
        """The weights that go to the F-server."""
        return {part: self._settings.travelling(part, self._parts[part].weights()) for part in parts}

    def state(self, averaged: tuple[str, ...]) -> Tensors:
        """What this client keeps for its next round besides the averaged weights, as one flat dict."""
        state = {f"extra/{name}": tensor for name, tensor in kept(self.extra, "client").items()}
        for part, replica in self._parts.items():
            if self._settings.keeps_optimizer(averaged=part in self._averaged):
                state |= {f"optimizer/{part}/{path}": tensor for path, tensor in replica.optimizer_state().items()}
            own = self._own[part]
            if replica.optimizer is not None:
                weights = replica.weights()
                travels = self._settings.travelling(part, weights) if part in averaged else {}
                own = {name: tensor for name, tensor in weights.items() if name not in travels}
            state |= {f"own/{part}/{name}": tensor for name, tensor in own.items()}
        return state


ALIGNMENT = 64
"""Of tensors in memory, in bytes, as torch's own: products of other addresses may have other last bits."""


class _Room:
    """Memory that copies of tensors fill, one behind the other."""

    def __init__(self, memory: Tensor) -> None:
        self._free = memory

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor there, in the same layout; a tensor that has gaps stays as it is."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if last + 1 != tensor.numel():
            return tensor
        taken, self._free = self._free[: tensor.nbytes], self._free[_aligned(tensor.nbytes) :]
        return taken.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


HELD = "held/"
"""What stands before the names of the weights of the last `take_hold`, among what an algorithm keeps at a client."""


def _pull(now: Tensor, then: Tensor) -> Tensor:
    """(z - z_0) / rms(z_0)^2: the mean square is that of a token, [B, L, C], or of a sample of any other form."""
    dimensions = (-1,) if then.ndim == 3 else tuple(range(1, then.ndim))
    pull = (now.detach() - then) / rms(then, dimensions).square()
    return torch.where(then.any(dimensions, keepdim=True), pull, 0.0)  # nothing has no size to be measured by


def chosen_steps(order: Iterator[Tensor], steps: range | None) -> Iterator[tuple[int, Tensor]]:
    """Local steps with their numbers: those in `steps`, or all of them."""
    return enumerate(order) if steps is None else islice(enumerate(order), steps.start, steps.stop, steps.step)


def local_order(examples: int, config: Config, client: int, t: int) -> Iterator[Tensor]:
    """For each local step of a client's round t, the places of its batch among its examples, int64 [B]."""
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

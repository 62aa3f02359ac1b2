"""Several clients that take their local steps as one, so that small batches do not leave a GPU idle.

Weights, buffers and optimizer states of the clients are stacked along a new first dimension: [N, ...] for N clients. A
forward pass is that of one client under `torch.vmap`, with row n of every tensor in the module for client n. So the
batch, z_f, targets and losses are stacks too. Backward passes are ordinary ones, from the sum of the clients' losses:
no client's loss depends on another's weights, and each row gets its own client's gradient. An optimizer step is one
of the stack: SGD and Adam work element by element, so each row gets its own client's step. Adam also counts its steps,
once for a stack, so clients are in one group only if they have taken as many.

A group is made of clients as an engine makes them for their rounds, each from its state and what came down, and hands
back to them what they have become. Who they are, what they draw, send and keep is theirs alone: a group only computes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fsl_sage.alignment.passes import Smash, gradients_of, scaled
from fsl_sage.models.layout import plain_layers
from fsl_sage.models.norm import batch_statistics, in_training
from fsl_sage.problems.base import Batch
from fsl_sage.roles.client import Client
from fsl_sage.roles.corrections import pull
from fsl_sage.roles.protocols import ClientRole
from fsl_sage.roles.replica import MakeOptimizer, Replica
from fsl_sage.roles.work import Settings, boundary
from fsl_sage.split import detached_leaves, with_gradients
from fsl_sage.wire.message import Message, Tensors

STEPS = "step"
"""What an optimizer remembers of its weights as a whole: the number of its steps."""


class Group(ClientRole):
    """N clients with batches of the same sizes, as one. Every tensor that a client has is [N, ...] here.

    It can do what the local rounds of clients need that learn by a loss behind the cut and wait for nobody.
    """

    def __init__(self, clients: Sequence[Client], settings: Settings) -> None:
        first = clients[0]
        self.id = -1  # no client's number
        self.round = self.step_index = -1
        self.examples = torch.cat([client.examples for client in clients])
        self.received = first.received  # once for all: it goes with each row of a stack
        self.received_extra = first.received_extra
        self.extra: Tensors = {}
        self.lr_used = 0.0
        self._clients = clients
        self._settings = settings
        self._losses: list[Tensor] = []
        self._stacks = {
            part: stacked([client.replicas[part] for client in clients], settings.optimizer_of(part))
            for part in first.replicas
        }

    def batches(self, t: int, steps: range | None = None) -> Iterator[Batch]:
        """The clients' mini-batches of a step as one, step after step. Each client draws its own."""
        self.round = t
        for own in zip(*(client.batches(t, steps) for client in self._clients), strict=True):
            self.step_index = self._clients[0].step_index
            inputs = pytree.tree_map(lambda *x: torch.stack(x), *(batch.inputs for batch in own))
            target = {name: torch.stack([batch.target[name] for batch in own]) for name in own[0].target}
            yield Batch(inputs, target)

    def forward(self, batch: Batch) -> Smash:
        """z_f of all clients, [N, B, *cut] each, with the graph that `backward` needs."""
        slots = self._stacks["client"].slots
        in_training(slots.module)

        def smashed(tensors: Tensors, inputs: Any) -> Smash:
            with slots.holding(tensors) as module:
                return boundary(module(**inputs) if isinstance(inputs, Mapping) else module(inputs))

        return self._for_each(smashed, "client", batch.inputs)

    def auxiliary_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """The auxiliaries' estimates of z_b. Auxiliaries that the clients train get gradients too."""
        return self._gradient("auxiliary", z, target)

    def server_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """z_b through the clients' own copies of the server part (FedAvg)."""
        return self._gradient("server", z, target)

    def _gradient(self, part: str, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """As `Passes.learn` where the part is trained, as `Passes.cut_gradient` where it is not."""
        stack = self._stacks[part]
        inputs = detached_leaves(z)
        if stack.optimizer is not None:
            in_training(stack.slots.module)
            losses = self._losses_of(part, inputs, target)
            torch.autograd.backward(losses.sum())
        else:
            wanted = [leaf for leaf in inputs if leaf.requires_grad]
            with batch_statistics(stack.slots.module):
                losses = self._losses_of(part, inputs, target)
            torch.autograd.backward(losses.sum(), inputs=wanted)
        self._losses.append(losses.detach())

        def with_scale(tensors: Tensors, gradients: Smash) -> Smash:
            with stack.slots.holding(tensors) as module:
                return scaled(module, gradients)

        return self._for_each(with_scale, part, gradients_of(inputs))

    def _losses_of(self, part: str, z: Smash, target: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of each client's batch, [N]."""
        task, slots = self._settings.task, self._stacks[part].slots

        def loss(tensors: Tensors, z: Smash, target: Tensors) -> Tensor:
            with slots.holding(tensors) as module:
                return task.loss(task.output(module, z, target), target)

        losses: Tensor = self._for_each(loss, part, z, dict(target))
        return losses

    def _for_each(self, compute: Callable[..., Any], part: str, *given: Any) -> Any:
        """What `compute` gives for a client's row of a part's tensors and of all that is given; rows of it all."""
        with plain_layers():
            return torch.vmap(compute)(dict(self._stacks[part].tensors), *given)

    def backward(self, z: Smash, gradient: Smash) -> None:
        """Backpropagate z_b into the client-side models (Algorithm 1: J_c z_b)."""
        torch.autograd.backward(*with_gradients(z, gradient))

    def step(self, **lr: float) -> None:
        """One optimizer step of every part that the clients train; by part, a learning rate that is not `lr()`."""
        if proximal := self._settings.config.averaging.proximal:
            pull(self, proximal, self._clients[0].corrected)
        for part, stack in self._stacks.items():
            if stack.optimizer is not None:
                stack.step(lr.get(part, self.lr()))
        self.lr_used += self.lr()

    def lr(self) -> float:
        """The learning rate of the batch at hand: it goes by round and step, so it is the same for all."""
        return self._clients[0].lr()

    def parameters(self, part: str) -> Mapping[str, Tensor]:
        """The trained weights of a part, with their gradients between `backward` and `step`; [N, ...] each."""
        return self._stacks[part].parameters()

    def hand_back(self) -> None:
        """Give every client its own weights, buffers, optimizer states and losses. The group is over."""
        for part, stack in self._stacks.items():
            if stack.optimizer is not None:
                take_apart(stack, [client.replicas[part] for client in self._clients])
        for place, client in enumerate(self._clients):
            client.losses += [losses[place] for losses in self._losses]
            client.lr_used += self.lr_used

    # What no group can do. A run that would need it is refused before it starts.

    def own_examples(self) -> Iterator[Batch]:
        """Clients have different numbers of examples."""
        self._cannot("own_examples")

    def output(self, part: str, *inputs: Tensor) -> Any:
        """Whoever asks for outputs computes a loss of one client's."""
        self._cannot("output")

    def infer(self, batch: Batch, part: str) -> tuple[Smash, Any]:
        """As `output`."""
        self._cannot("infer")

    def task_loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """As `output`."""
        self._cannot("task_loss")

    def minimise(self, loss: Tensor) -> None:
        """As `output`."""
        self._cannot("minimise")

    def head_gradient(self, features: Smash, target: Mapping[str, Tensor]) -> Smash:
        """Clients of a U-shape wait."""
        self._cannot("head_gradient")

    def gradient(self, part: str, z: Smash, loss: Callable[[Any], Tensor]) -> Smash:
        """As `output`."""
        self._cannot("gradient")

    def take_hold(self) -> None:
        """What is held is kept by client."""
        self._cannot("take_hold")

    def held(self, batch: Batch, z: Smash, gradient: Smash, strength: float) -> Smash:
        """As `take_hold`."""
        self._cannot("held")

    def loss(self, batch: Batch, part: str, *, leaves_trace: bool = True) -> tuple[Smash, Tensor]:
        """Steps without a backward pass go by one client's loss."""
        self._cannot("loss")

    def direction(self) -> Tensor:
        """As `loss`."""
        self._cannot("direction")

    def moved(self, u: Tensor, by: float) -> AbstractContextManager[None]:
        """As `loss`."""
        self._cannot("moved")

    def move(self, u: Tensor, by: float | Tensor) -> None:
        """As `loss`."""
        self._cannot("move")

    def replace(self, part: str, tensors: Tensors) -> None:
        """What comes down is for one client."""
        self._cannot("replace")

    def optimizer_state(self, part: str) -> Tensors:
        """It goes to the F-server by client."""
        self._cannot("optimizer_state")

    def set_optimizer_state(self, part: str, state: Tensors) -> None:
        """As `optimizer_state`."""
        self._cannot("set_optimizer_state")

    def _cannot(self, method: str) -> NoReturn:
        raise NotImplementedError(f"clients that train as one have no `{method}`")


def stacked(replicas: Sequence[Replica], make_optimizer: MakeOptimizer) -> Replica:
    """The tensors and optimizer states of these replicas, [N, ...] each; with an optimizer where they have one."""
    first = replicas[0]
    tensors = {name: torch.stack([own.tensors[name].detach() for own in replicas]) for name in first.tensors}
    stack = Replica(first.slots, tensors, make_optimizer if first.optimizer is not None else None)
    states = [own.optimizer_state() for own in replicas]
    stack.load_optimizer_state(
        {
            path: value.clone() if _is_shared(path) else torch.stack([own[path] for own in states])
            for path, value in states[0].items()
        }
    )
    return stack


def take_apart(stack: Replica, replicas: Sequence[Replica]) -> None:
    """Put every row of a stack, of its optimizer's state too, back into the replica that it was made from."""
    state = stack.optimizer_state()
    for place, own in enumerate(replicas):
        own.set_weights({name: tensor[place] for name, tensor in stack.weights().items()})
        own.load_optimizer_state(
            {path: (value if _is_shared(path) else value[place]).clone() for path, value in state.items()}
        )


def _is_shared(path: str) -> bool:
    return path.rsplit("/", 1)[-1] == STEPS


def uploads_of(message: Message, clients: int) -> list[Message]:
    """What each client of a group uploads. The rows are copied: who keeps one should not keep them all in memory."""

    def row(x: Tensor, place: int) -> Tensor:
        return x[place].clone(memory_format=torch.contiguous_format)

    return [
        Message(
            {kind: {name: row(x, place) for name, x in arrays.items()} for kind, arrays in message.parts.items()},
            message.values,
        )
        for place in range(clients)
    ]


def schedule_of(sizes: Sequence[int], state: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What clients of one group have in common: the sizes of their batches, and how far their optimizers are.

    Args:
        sizes: Those of the client's batches in the round.
        state: What the client keeps between rounds.
    """
    remembered = {path: value for path, value in state.items() if path.startswith("optimizer/")}
    steps = tuple(float(value) for path, value in sorted(remembered.items()) if _is_shared(path))
    return tuple(sizes), tuple(sorted(remembered)), steps

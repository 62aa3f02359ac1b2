"""An engine that computes nothing: it runs the algorithm's own code on shapes, so that the ledger fills as in a run.

`fsl-sage cost` is this. What an algorithm sends is thus written down once, in the algorithm.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.alignment.passes import Smash
from fsl_sage.engines.base import Delivery, Engine, Replies, Setup, advance, begun, coded_update, sent_along
from fsl_sage.engines.dry_server import DrySServer, Outputs, Shapes
from fsl_sage.engines.server import HostedServer, NoServer
from fsl_sage.optimizers import state_shapes
from fsl_sage.problems.base import Batch
from fsl_sage.roles.client import chosen_steps, local_batch_sizes, local_order
from fsl_sage.roles.protocols import ClientRole, Parts, Update
from fsl_sage.split import boundary_shapes
from fsl_sage.wire.ends import ClientEnd
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import Message, Tensors


class DryEngine(Engine):
    """Modules and tensors on the meta device: shapes without numbers."""

    def __init__(self, setup: Setup, smashed: dict[tuple[str, Shapes], Smash] | None = None) -> None:
        """`smashed`, by the client's own cut and the inputs' shapes, is filled.

        Setups that differ in the algorithm alone may share it.
        """
        self.setup = setup
        self.outputs = Outputs(setup)
        has_s_server = setup.algorithm.has_s_server
        self.server = self._server = HostedServer(setup, DrySServer(setup)) if has_s_server else NoServer()
        self._smashed = {} if smashed is None else smashed
        self._batches: dict[int, Batch] = {}
        self._extras: dict[int, Tensors] = {}
        """What an algorithm keeps at each client: the only state that a dry client has."""

    def train(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> list[Update]:
        """Every client's local round, step by step together; the contents of replies are made up."""
        self._server.begin(t)
        players = {id: DryClient(id, self, delivery, self._extras.setdefault(id, {})) for id in clients}
        rounds = {id: begun(self.setup.algorithm, player, t) for id, player in players.items()}
        ends = {id: self._end(t, player) for id, player in players.items()}
        replies: Replies = dict.fromkeys(clients)
        while replies:
            uploads = {
                id: _sent(upload, players[id], ends[id])
                for id, reply in replies.items()
                if (upload := advance(rounds[id], ends[id].receive(reply))) is not None
            }
            replies = self._server.exchange(uploads, link)
        return [self._update(t, players[id]) for id in clients]

    def uploads(self, t: int, id: int) -> list[Message]:
        """What a client that does not wait uploads in round t, as shapes."""
        client = DryClient(id, self, Delivery(self.setup.initial, {}))
        end = self._end(t, client)
        return [_sent(upload, client, end) for upload in begun(self.setup.algorithm, client, t)]

    def update(self, t: int, id: int) -> Update:
        """What a client brings to the F-server after round t, as shapes."""
        return self._update(t, DryClient(id, self, Delivery(self.setup.initial, {})))

    def _update(self, t: int, client: "DryClient") -> Update:
        setup = self.setup
        own = {part: setup.initial_of(client.id, part) for part in setup.algorithm.averaged_in(t)}
        parts = {part: setup.settings.travelling(part, tensors) for part, tensors in own.items()}
        update = Update(client.id, parts, extra=sent_along(setup, client, t))
        return coded_update(setup, self._end(t, client), update, {})

    def _end(self, t: int, client: "DryClient") -> ClientEnd:
        return ClientEnd(self.setup.settings.codecs, client.id, t, {}, len(client.examples))

    def order(self, t: int, id: int) -> Iterator[Tensor]:
        """For each local step, which examples a client takes; where no data is known, only how many."""
        settings, examples = self.setup.settings, self.setup.examples[id]
        if examples.is_meta:
            yield from (examples[:size] for size in local_batch_sizes(len(examples), settings.config))
        else:
            yield from (examples[indices] for indices in local_order(len(examples), settings.config, id, t))

    def batch(self, indices: Tensor) -> Batch:
        """A batch of these examples, as shapes."""
        if self.setup.settings.task.sizes_vary:
            return self._batch(indices)
        if len(indices) not in self._batches:
            self._batches[len(indices)] = self._batch(indices)
        return self._batches[len(indices)]

    def _batch(self, indices: Tensor) -> Batch:
        return self.setup.settings.task.training_batch(indices, torch.Generator())

    def smashed(self, client: int, batch: Batch) -> Smash:
        """The boundary tensors of a client's batch, as shapes."""
        inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {"": batch.inputs}
        cut = self.setup.cuts[client] if self.setup.cuts else ""
        key = cut, tuple(tensor.shape for tensor in inputs.values())
        if key not in self._smashed:
            with self.setup.settings.passes.autocast():
                self._smashed[key] = boundary_shapes(self.setup.held_by(client)["client"], batch.inputs)
        return self._smashed[key]

    def trained_weights(self, t: int) -> int:
        """The number of weights that a client trains in round t."""
        modules = [self.setup.modules[part] for part in self.setup.algorithm.trained_in(t)]
        return sum(weight.numel() for module in modules for weight in module.parameters() if weight.requires_grad)

    def evaluate(self, parts: Parts) -> dict[str, Any]:
        """Nothing was computed."""
        return {}

    def local_tensors(self) -> dict[int, Parts]:
        """Nothing was computed."""
        return {}

    def state(self) -> Tensors:
        """A dry run is not resumed."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """A dry run is not resumed."""

    def close(self) -> None:
        """Nothing to release."""


def _sent(upload: Message, client: "DryClient", end: ClientEnd) -> Message:
    """An upload as it travels, which says of which local step it is."""
    return end.send(replace(upload, values={**upload.values, "step": client.step_index}), client.places)


class DryClient(ClientRole):
    """A client that answers with shapes."""

    def __init__(self, id: int, engine: DryEngine, delivery: Delivery, extra: Tensors | None = None) -> None:
        self.id = id
        self.received = delivery.received
        self.received_extra = delivery.extra
        self.extra = {} if extra is None else extra
        self.lr_used = 0.0
        self.round = self.step_index = -1
        self.places: Tensor | None = None
        self.examples = engine.setup.examples[id]
        self._engine = engine

    def batches(self, t: int, steps: range | None = None) -> Iterator[Batch]:
        """Batches of the right sizes."""
        self.round = t
        for step, indices in chosen_steps(self._engine.order(t, self.id), steps):
            self.step_index, self.places = step, torch.empty_like(indices, device="meta")
            yield replace(self._engine.batch(indices), examples=indices)

    def own_examples(self) -> Iterator[Batch]:
        """Batches of the right sizes."""
        for chosen in torch.split(self.examples, self._engine.setup.settings.config.batch_size):
            self.step_index, self.places = self.step_index + 1, torch.empty_like(chosen, device="meta")
            yield replace(self._engine.batch(chosen), examples=chosen)

    def forward(self, batch: Batch) -> Smash:
        """The boundary of a batch."""
        return self._engine.smashed(self.id, batch)

    def output(self, part: str, *inputs: Tensor) -> Any:
        """What the part's module gives for shapes."""
        return self._engine.outputs.of(part, *inputs)

    def infer(self, batch: Batch, part: str) -> tuple[Smash, Any]:
        """The boundary of a batch, and what the part's module gives for it."""
        z = self.forward(batch)
        return z, self.output(part, *z)

    def task_loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """A number that is not known."""
        return torch.empty((), device="meta")

    def minimise(self, loss: Tensor) -> None:
        """Nothing is computed."""

    def auxiliary_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """As large as what it is the gradient of."""
        return z

    def server_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        """As large as what it is the gradient of."""
        return z

    def head_gradient(self, features: Smash, target: Mapping[str, Tensor]) -> Smash:
        """As large as what it is the gradient of."""
        return features

    def gradient(self, part: str, z: Smash, loss: Callable[[Any], Tensor]) -> Smash:
        """As large as what it is the gradient of."""
        return z

    def take_hold(self) -> None:
        """Nothing is computed."""

    def held(self, batch: Batch, z: Smash, gradient: Smash, strength: float) -> Smash:
        """As large as what it is the gradient of."""
        return gradient

    def backward(self, z: Smash, gradient: Smash) -> None:
        """Nothing is computed."""

    def step(self, **lr: float) -> None:
        """Nothing is computed."""

    def lr(self) -> float:
        """Nothing is computed."""
        return 0.0

    def loss(self, batch: Batch, part: str, *, leaves_trace: bool = True) -> tuple[Smash, Tensor]:
        """The boundary of a batch, and a number that is not known."""
        return self.forward(batch), torch.empty((), device="meta")

    def direction(self) -> Tensor:
        """As long as there are weights."""
        return torch.empty(self._engine.trained_weights(self.round), device="meta")

    def moved(self, u: Tensor, by: float) -> AbstractContextManager[None]:
        """Shapes stay."""
        return nullcontext()

    def move(self, u: Tensor, by: float | Tensor) -> None:
        """Shapes stay."""

    def parameters(self, part: str) -> Mapping[str, Tensor]:
        """Shapes of the trained weights, with gradients of the same shapes."""
        setup = self._engine.setup
        own = setup.held_by(self.id)[part].named_parameters()
        named = {name: p for name, p in own if name in setup.initial[part]}
        return {name: _with_gradient(parameter) for name, parameter in named.items() if parameter.requires_grad}

    def replace(self, part: str, tensors: Tensors) -> None:
        """Shapes stay."""

    def optimizer_state(self, part: str) -> Tensors:
        """Shapes of what the optimizer remembers after a step."""
        config = self._engine.setup.settings.config.optimizer
        return state_shapes(config.name, self.parameters(part), config.momentum)

    def set_optimizer_state(self, part: str, state: Tensors) -> None:
        """Shapes stay."""


def _with_gradient(parameter: Tensor) -> Tensor:
    shape = nn.Parameter(torch.empty_like(parameter, device="meta"))
    shape.grad = torch.empty_like(shape)
    return shape

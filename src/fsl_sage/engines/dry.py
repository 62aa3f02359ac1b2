"""An engine that computes nothing: it runs the algorithm's own code on shapes, so that the ledger fills as in a run.

`fsl-sage cost` is this. What an algorithm sends is thus written down once, in the algorithm.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.alignment.passes import Smash
from fsl_sage.engines.base import Delivery, Engine, Setup, advance, bill
from fsl_sage.roles.client import Client, local_batch_sizes, local_order
from fsl_sage.roles.f_server import Update
from fsl_sage.roles.s_server import SServer
from fsl_sage.roles.work import Parts, boundary
from fsl_sage.split import boundary_shapes
from fsl_sage.tasks import Batch
from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.message import AUXILIARY, Message, Tensors

Shapes = tuple[torch.Size, ...]
"""Of a batch's inputs."""


class DryEngine(Engine):
    """Modules and tensors on the meta device: shapes without numbers."""

    def __init__(self, setup: Setup, smashed: dict[Shapes, Smash] | None = None) -> None:
        """`smashed`, by the inputs' shapes, is filled; setups that differ in the algorithm alone may share it."""
        self.setup = setup
        self._server = _DryServer(setup)
        self._smashed = {} if smashed is None else smashed
        self._batches: dict[int, Batch] = {}

    def train(self, t: int, clients: Sequence[int], delivery: Delivery, ledger: Ledger) -> list[Update]:
        """Every client's local round, step by step together; uploads and replies are billed, their contents made up."""
        algorithm = self.setup.algorithm
        self._server.begin(t)
        players = {id: _DryClient(id, self, delivery.received) for id in clients}
        rounds = {id: algorithm.local_round(cast(Client, player), t) for id, player in players.items()}
        replies: dict[int, Message | None] = dict.fromkeys(clients)
        while replies:
            uploads = {
                id: _of_step(upload, players[id])
                for id, reply in replies.items()
                if (upload := advance(rounds[id], reply)) is not None
            }
            for id, upload in uploads.items():
                bill(ledger, t, id, "up", upload)
            replies = algorithm.on_uploads(cast(SServer, self._server), uploads) if uploads else {}
            for id, reply in replies.items():
                if reply is not None:
                    bill(ledger, t, id, "down", reply)
        return [self.update(t, id) for id in clients]

    def uploads(self, t: int, id: int) -> list[Message]:
        """What a client that does not wait uploads in round t, as shapes."""
        client = _DryClient(id, self, {})
        local_round = self.setup.algorithm.local_round(cast(Client, client), t)
        return [_of_step(upload, client) for upload in local_round]

    def update(self, t: int, id: int) -> Update:
        """What a client brings to the F-server after round t, as shapes."""
        settings, initial = self.setup.settings, self.setup.initial
        parts = self.setup.algorithm.averaged_in(t)
        return Update(id, {part: settings.travelling(part, initial[part]) for part in parts}, {})

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

    def smashed(self, batch: Batch) -> Smash:
        """The boundary tensors of a batch, as shapes."""
        inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {"": batch.inputs}
        key = tuple(tensor.shape for tensor in inputs.values())
        if key not in self._smashed:
            with self.setup.settings.passes.autocast():
                self._smashed[key] = boundary_shapes(self.setup.modules["client"], batch.inputs)
        return self._smashed[key]

    def share_auxiliary(self, tensors: Tensors) -> None:
        """Sizes stay."""

    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """The messages that a run would send."""
        if not self.setup.algorithm.has_s_server:
            return []
        return [*self.setup.algorithm.end_of_round(cast(SServer, self._server), t), *self._server.left]

    def remarks(self) -> dict[str, Any]:
        """Whether a run would align in this round."""
        return {"aligned": self._server.aligned}

    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """Nothing was computed."""
        return None

    def recalibrated(self) -> Tensors | None:
        """Nothing was computed."""
        return None

    def server_loss(self) -> float | None:
        """Nothing was computed."""
        return None

    def server_weights(self) -> Tensors | None:
        """Nothing was computed."""
        return None

    def evaluate(self, parts: Parts) -> dict[str, float]:
        """Nothing was computed."""
        return {}

    def local_tensors(self) -> list[Parts]:
        """Nothing was computed."""
        return []

    def state(self) -> Tensors:
        """A dry run is not resumed."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """A dry run is not resumed."""

    def close(self) -> None:
        """Nothing to let go of."""


def _of_step(upload: Message, client: "_DryClient") -> Message:
    """An upload that says of which local step it is."""
    return replace(upload, values={**upload.values, "step": client.step_index})


class _DryClient:
    """A client that answers with shapes."""

    def __init__(self, id: int, engine: DryEngine, received: Parts) -> None:
        self.id = id
        self.received = received
        self.extra: Tensors = {}
        self.round = self.step_index = -1
        self.examples = engine.setup.examples[id]
        self._engine = engine

    def batches(self, t: int) -> Iterator[Batch]:
        self.round = t
        for step, indices in enumerate(self._engine.order(t, self.id)):
            self.step_index = step
            yield self._engine.batch(indices)

    def forward(self, batch: Batch) -> Smash:
        return self._engine.smashed(batch)

    def auxiliary_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        return z

    server_gradient = head_gradient = auxiliary_gradient

    def backward(self, z: Smash, gradient: Smash) -> None: ...

    def step(self) -> None: ...

    def parameters(self, part: str) -> Mapping[str, Tensor]:
        return {}  # nothing has a gradient here

    def replace(self, part: str, tensors: Tensors) -> None: ...


class _DryServer:
    """An S-server that answers with shapes."""

    def __init__(self, setup: Setup) -> None:
        self.alignment: dict[int, Message] = {}
        self.round = 0
        self.aligned = False
        self.left: list[tuple[int, Message]] = []
        self._config = setup.settings.config
        self._auxiliary = setup.initial.get("auxiliary", {})
        self._module = setup.modules["server"]
        self._open: dict[int, Smash] = {}

    def begin(self, t: int) -> None:
        self.round, self.aligned, self.left = t, False, []

    def learn(self, client: int, smashed: Message, *, cut_gradient: bool = False, own_copy: bool = False) -> Smash:
        floating = tuple(tensor for tensor in smashed.smashed if tensor.is_floating_point())
        return floating if cut_gradient else ()

    def forward(self, client: int, smashed: Message, *, own_copy: bool = False) -> Smash:
        self._open[client] = smashed.smashed
        return tuple(tensor.detach() for tensor in boundary(self._module(*smashed.smashed)))

    def backward(self, client: int, gradients: Message) -> Smash:
        return tuple(tensor for tensor in self._open.pop(client) if tensor.is_floating_point())

    def remember(self, client: int, smashed: Message) -> None:
        self.alignment[client] = smashed

    def align(self, clients: Iterable[int]) -> Iterator[tuple[int, Message]]:
        self.aligned = True
        receivers = range(self._config.clients) if self._config.alignment.scope == "pooled" else clients
        return ((client, Message({AUXILIARY: self._auxiliary})) for client in receivers)

    def average_copies(self) -> None: ...

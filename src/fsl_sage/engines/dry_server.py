"""The S-server of the dry engine, which answers with shapes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.alignment.passes import Smash
from fsl_sage.engines.base import Setup
from fsl_sage.roles.auxiliaries import aligned_auxiliary
from fsl_sage.roles.footprint import Footprint
from fsl_sage.roles.protocols import SServerRole
from fsl_sage.roles.replica import Slots
from fsl_sage.roles.work import boundary
from fsl_sage.split import output_shapes
from fsl_sage.wire.message import Message, Tensors

Shapes = tuple[torch.Size, ...]
"""Of a batch's inputs."""


class Outputs:
    """What parts give for shapes: a pass for each shape, however many batches there are."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._known: dict[tuple[str, Shapes], Any] = {}

    def of(self, part: str, *inputs: Tensor) -> Any:
        """The output of a part for these inputs."""
        key = part, tuple(tensor.shape for tensor in inputs)
        if key not in self._known:
            with self._setup.settings.passes.autocast():
                self._known[key] = output_shapes(self._setup.modules[part], inputs, {})
        return self._known[key]


class DrySServer(SServerRole):
    """An S-server that answers with shapes."""

    def __init__(self, setup: Setup) -> None:
        self.round = 0
        self.left: list[tuple[int, Message]] = []
        self.replied: dict[int, Message] = {}
        self.extra: Tensors = {}
        self.client_weights = setup.client_weights
        self._aligned = False
        self._remembered: set[int] = set()
        self._settings = setup.settings
        self._config = setup.settings.config
        self._initial = setup.initial
        self._module = setup.modules["server"]
        self._weights = Slots(setup.at_s_server()["server"]).tensors() if setup.cuts else setup.initial["server"]
        self._open: dict[int, Smash] = {}
        self._kept: dict[int, list[Message]] = {}
        self._outputs = Outputs(setup)

    def begin(self, t: int) -> None:
        """Round t starts."""
        if t != self.round:
            self.round, self._aligned, self.left = t, False, []

    def learn(self, client: int, smashed: Message, *, cut_gradient: bool = False, own_copy: bool = False) -> Smash:
        """Cut gradients as large as the smashed data."""
        return _floating(smashed.smashed) if cut_gradient else ()

    def join(self, client: int, smashed: Message, share: float) -> Smash:
        """Cut gradients as large as the smashed data."""
        return _floating(smashed.smashed)

    def step(self, step: int) -> None:
        """Nothing is computed."""

    def terms(self, smashed: Message) -> int:
        """Nothing is computed."""
        return 1

    def forward(self, client: int, smashed: Message, *, own_copy: bool = False) -> Smash:
        """What the module gives for shapes."""
        self._open[client] = smashed.smashed
        return tuple(tensor.detach() for tensor in boundary(self._module(*smashed.smashed)))

    def backward(self, client: int, gradients: Message) -> Smash:
        """Cut gradients as large as the smashed data."""
        return _floating(self._open.pop(client))

    def join_backward(self, client: int, gradients: Message, share: float) -> Smash:
        """Cut gradients as large as the smashed data."""
        return self.backward(client, gradients)

    def output(self, *z: Tensor, leaves_trace: bool = True) -> Any:
        """What the module gives for shapes."""
        return self._outputs.of("server", *z)

    def infer(self, *z: Tensor) -> Any:
        """What the module gives for shapes."""
        return self._outputs.of("server", *z)

    def task_loss(self, output: Any, target: Mapping[str, Tensor], *, counts: bool = True) -> Tensor:
        """A number that is not known."""
        return torch.empty((), device="meta")

    def join_loss(self, loss: Tensor) -> None:
        """Nothing is computed."""

    def minimise(self, loss: Tensor, share: float) -> None:
        """Nothing is computed."""

    def keep(self, client: int, upload: Message) -> None:
        """Shapes are kept as arrays are."""
        self._kept.setdefault(client, []).append(upload)

    def take_kept(self) -> dict[int, list[Message]]:
        """By client, in order."""
        kept, self._kept = self._kept, {}
        return dict(sorted(kept.items()))

    def fold_copy(self, client: int, cohort: Sequence[int]) -> None:
        """There is none."""

    def average_copies(self) -> None:
        """There are none."""

    def drop(self, client: int) -> None:
        """Nobody fails."""

    def remember(self, client: int, smashed: Message, gradients: Smash = ()) -> None:
        """Note that the client has uploaded."""
        self._remembered.add(client)

    def remembered(self) -> list[int]:
        """The clients that have uploaded, in order."""
        return sorted(self._remembered)

    def drifted(self, below: float, every: int) -> list[int]:
        """As often as can be: what is not known is taken to have drifted."""
        return self.remembered() if self.round % every == 0 else []

    def align(self, clients: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """Auxiliaries of the right size."""
        if not (clients := list(clients)):
            return iter(())
        self._aligned = True
        receivers = range(self._config.clients) if self._config.alignment.scope == "pooled" else clients
        auxiliary = self._initial["auxiliary"]
        message = aligned_auxiliary(self._settings, -1, self.round, auxiliary, auxiliary)
        return ((client, message) for client in receivers)

    def set_auxiliary(self, tensors: Tensors) -> None:
        """Sizes stay."""

    def set_weights(self, tensors: Tensors) -> None:
        """Shapes stay."""

    def weights(self) -> Tensors:
        """Shapes."""
        return dict(self._weights)

    def recalibrated(self) -> Tensors:
        """Shapes."""
        return self._initial["server"]

    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """Nothing was computed."""
        return None

    def watched(self) -> AbstractContextManager[None]:
        """Nothing is computed."""
        return nullcontext()

    def footprint(self) -> Footprint | None:
        """Nothing is computed."""
        return None

    def take_loss(self) -> float | None:
        """Nothing was computed."""
        return None

    def remarks(self) -> dict[str, Any]:
        """Whether a run would align in this round."""
        return {"aligned": self._aligned}

    def state(self) -> Tensors:
        """A dry run is not resumed."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """A dry run is not resumed."""


def _floating(tensors: Smash) -> Smash:
    return tuple(tensor for tensor in tensors if tensor.is_floating_point())

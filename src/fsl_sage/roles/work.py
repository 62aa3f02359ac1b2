"""What clients and S-server share when they compute: the settings and a worker's modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.alignment.passes import Passes, Smash
from fsl_sage.config import Config
from fsl_sage.optimizers import make_optimizer
from fsl_sage.precision import wide
from fsl_sage.problems.base import Task
from fsl_sage.roles.replica import MakeOptimizer, Slots
from fsl_sage.roles.schedule import Schedule
from fsl_sage.seeding import derive
from fsl_sage.split.trace.skeleton import on_meta, skeleton
from fsl_sage.wire.codecs import Codecs
from fsl_sage.wire.message import Tensors


class Workbench:
    """One worker's modules by part ("client", "server", "auxiliary"). Replicas put their weights into them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.slots = _SlotsByPart(modules)


class _SlotsByPart(dict[str, Slots]):
    """Copies a part when it is first used, so that a worker holds only the parts that it needs."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules = modules

    def __missing__(self, part: str) -> Slots:
        self[part] = Slots(_copy(self._modules[part]))
        return self[part]


def _copy(module: nn.Module) -> nn.Module:
    """A copy for replicas to go in. It shares the frozen weights, which never change and may be most of a model.

    In the places of what a replica brings it has shapes alone, which take no memory.
    """
    unsaved = {
        id(buffer)
        for owner in module.modules()
        for key, buffer in owner._buffers.items()
        if key in owner._non_persistent_buffers_set
    }

    def own(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            return tensor
        return tensor.detach().clone() if id(tensor) in unsaved else on_meta(tensor)

    return skeleton(module, own)


class Chain(nn.Module):
    """Parts of a model one behind the other, each taking the boundary that the one before it gives."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.training = all(part.training for part in parts)

    def forward(self, *z: torch.Tensor) -> Any:
        """From the first part's inputs to the last part's output."""
        output: Any = z
        for part in self.parts:
            output = part(*boundary(output))
        return output


@dataclass(frozen=True)
class Settings:
    """What a role needs to know to take its steps."""

    config: Config
    task: Task
    device: torch.device
    steps: int
    """Local steps K of a round (of the client with the most)."""
    draws: bool = False
    """Whether the model draws random numbers in its forward pass (dropout)."""
    stays_local: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By part, the names that never travel: BatchNorm statistics where the policy is `local`."""
    codecs: Codecs = field(default_factory=Codecs)
    """How messages are coded."""
    trained: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By part, the names of the weights that are trained. Codecs code only these."""

    @property
    def passes(self) -> Passes:
        """Passes through the parts behind the cut."""
        return Passes(self.task, self.device, self.config.precision)

    def keeps_optimizer(self, *, averaged: bool) -> bool:
        """Whether an optimizer of a client, or of its own copy of the server part, outlasts a round where it is.

        Args:
            averaged: Whether it is the optimizer of a part that clients average.
        """
        return self.config.client_optimizer == "keep" or (self.config.client_optimizer == "average" and not averaged)

    def optimizer_of(self, part: str) -> MakeOptimizer:
        """The optimizer of a part, at a client or the S-server; the learning rate comes with each step."""
        config = self.config.optimizer
        decay = config.weight_decay
        if part in ("auxiliary", "decoder") and config.auxiliary_weight_decay is not None:
            decay = config.auxiliary_weight_decay
        return partial(make_optimizer, config.name, lr=config.lr, weight_decay=decay, momentum=config.momentum)

    def client_schedule(self) -> Schedule:
        """The clients' learning rate."""
        return Schedule(self.config.optimizer, self.config.optimizer.lr, self.config.rounds, self.steps)

    def server_schedule(self) -> Schedule:
        """The S-server's learning rate."""
        optimizer = self.config.optimizer
        lr = optimizer.lr if optimizer.server_lr is None else optimizer.server_lr
        return Schedule(optimizer, lr, self.config.rounds, self.steps)

    def seed_forward(self, purpose: str, client: int, t: int, step: int) -> None:
        """Seed torch for a forward pass that draws random numbers, by purpose, client, round and step."""
        if not self.draws:
            return
        seed = derive(self.config.seed, purpose, client, t, step)
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes ten times as long, at every step
        else:
            torch.manual_seed(seed)

    def travelling(self, part: str, tensors: Tensors) -> Tensors:
        """Those tensors of a part that are sent when it is averaged."""
        local = self.stays_local.get(part, frozenset())
        return {name: tensor for name, tensor in tensors.items() if name not in local}


def draws_in_forward(module: nn.Module) -> bool:
    """Whether a forward pass in training draws random numbers."""
    dropouts = (nn.modules.dropout._DropoutNd, nn.AlphaDropout, nn.FeatureAlphaDropout)
    # What models of transformers call the rates that they hand to functions.
    rates = (
        *("dropout", "attention_dropout", "attn_pdrop", "drop_prob"),
        *("hidden_dropout", "activation_dropout", "layerdrop", "drop_rate"),
    )
    return any(
        (isinstance(m, dropouts) and m.p > 0) or any(isinstance(r := getattr(m, n, 0), float) and r > 0 for n in rates)
        for m in module.modules()
    )


def mean_loss(losses: Sequence[Tensor]) -> float:
    """The mean of scalars, summed in float64."""
    return float(wide(torch.stack(list(losses))).mean())


def boundary(output: Any) -> Smash:
    """The client part's output as a tuple of tensors."""
    if isinstance(output, torch.Tensor):
        return (output,)
    return tuple(getattr(output, "tensors", output))

"""What an oracle is handed, as data, and what it returns.

The paper leaves open which weights a run starts from, which clients take part in a round, which examples are in a batch
and in which order an alignment takes its batches. These are handed to an oracle. All else it computes by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Tensors = dict[str, Tensor]
Target = Mapping[str, Tensor]


@dataclass(frozen=True)
class Alignment:
    """How the S-server aligns."""

    samples: int = 48
    """The newest samples that it keeps of each client."""
    batch_size: int = 16
    """Samples in a step; 0: the batches as they were uploaded."""
    optimizer: str = "adam"
    """"adam" or "sgd", the latter without momentum."""
    lr: float = 3e-3
    clip: float | None = None
    start: str = "previous"
    """"previous" or "server"."""
    scope: str = "pooled"
    """"pooled" or "client"."""
    keeps_optimizer: bool = False
    """Whether the optimizer's state goes on from one alignment to the next."""


@dataclass(frozen=True)
class Given:
    """A federation and all that the paper leaves open about it."""

    parts: Mapping[str, Callable[[], nn.Module]]
    """By part ("client", "server", "auxiliary"): makes the module, in plain torch.nn, float64."""
    initial: Mapping[str, Tensors]
    """By part: the initial weights and buffers under the names of the module's state_dict (trained weights and buffers
    alone, where a part has frozen ones too, which its maker brings)."""
    weights: list[float]
    """By client: how much it counts in an average."""
    cohorts: list[list[int]]
    """By round: the clients that take part, in ascending order."""
    batches: Mapping[tuple[int, int, int], tuple[Any, Target]]
    """By (round, client, step): what the client part is called with, and the target."""
    alignment_orders: Mapping[tuple[int, int], list[int]]
    """By (round, client), client -1 for a pooled alignment: the index of the batch that each alignment step takes."""
    loss: Callable[[Any, Target], Tensor]
    """(output, target) to the mean loss."""
    terms: Callable[[Target], int]
    """The number of loss terms that the mean is taken over."""
    clients: int = 3
    rounds: int = 3
    optimizer: str = "adam"
    """"adam", "adamw" or "sgd"; of clients and S-server."""
    lr: float = 1e-3
    server_lr: float = 1e-3
    weight_decay: float = 1e-4
    auxiliary_weight_decay: float = 1e-4
    """Of an auxiliary that clients train."""
    momentum: float = 0.9
    upload_every: int = 2
    align_every: int = 2
    align_rounds: tuple[int, ...] = ()
    """If not empty, the rounds that align, instead of every `align_every`-th."""
    align_until: int = 2**31
    align_at: str = "end"
    """"end" or "start" of a round."""
    warm_start: bool = False
    local_auxiliary: bool = False
    alignment: Alignment = field(default_factory=Alignment)


@dataclass
class Found:
    """What comes out of a run."""

    client: Tensors
    """The averaged client part after the last round: weights and buffers."""
    server: Tensors
    """The server part: the S-server's, or the averaged one of FedAvg."""
    auxiliaries: dict[int, Tensors]
    """By client: the auxiliary that it would use in the next round. Empty in algorithms without one."""
    bytes: dict[tuple[int, int, str, str], int]
    """By (round, client, "up" or "down", kind)."""

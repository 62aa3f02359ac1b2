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
    total: int | None = None
    """The newest samples that it keeps of all clients together."""
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
    loss: str = "squared"
    """"squared" or "cosine". With the latter an auxiliary has a buffer fitted_scale."""
    tokens: int | None = None
    """Texts: in the place of `samples`, the tokens that are kept of all clients together."""


@dataclass(frozen=True)
class Ridge:
    """An auxiliary that is a linear estimator. Then the part "auxiliary" is a RidgeAuxiliary."""

    strength: float
    forgetting: float
    signs: Tensor | None = None
    """[random features, other features]: the matrix of the random features, if there are any."""


@dataclass(frozen=True)
class FServerOptimizer:
    """FedOpt: what the F-server does with an average. The letters are those of Reddi et al. 2021, Algorithm 2."""

    kind: str = "sgd"
    """"sgd" (with beta1 as its momentum), "adagrad", "adam" or "yogi"."""
    lr: float = 1.0
    """η. With "sgd" and beta1 = 0 it is the server's side of two-sided learning rates (Yang et al. 2021)."""
    beta1: float = 0.0
    beta2: float = 0.99
    tau: float = 1e-3


@dataclass(frozen=True)
class Distillation:
    """FedGKT: examples that are known by their ids, and how client and server learn from each other's logits."""

    examples: Mapping[tuple[int, int], tuple[Tensor, Target]]
    """By (client, example): the inputs and the target of a batch of this one example. All of a client's training set.
    """
    client_batches: Mapping[tuple[int, int], list[list[int]]]
    """By (round, client): the examples in each of its batches, E_c epochs one behind the other."""
    server_batches: Mapping[int, list[list[tuple[int, int]]]]
    """By round: the (client, example) in each of the server's batches, E_s epochs one behind the other."""
    temperature: float = 3.0
    temperature_squared: bool = True
    """Whether the KL divergence is multiplied by the temperature's square."""
    client_kl: float = 1.0
    """The client's loss is CE + client_kl * KL. 0: no KL at the client."""
    server_kl: float = 1.0
    """The server's loss is server_kl * KL + server_ce * CE. 0: no KL at the server."""
    server_ce: float = 1.0


Mixing = Mapping[int, list[tuple[int, float]]]
"""LocFedMix-SL, in one step. By client i: its n_s partners as (j, λ), for the mixed activations λ s_i + (1 - λ) s_j."""


@dataclass(frozen=True)
class Given:
    """A federation and all that the paper leaves open about it."""

    parts: Mapping[str, Callable[[], nn.Module]]
    """By part ("client", "server", "auxiliary", "decoder", "blocks"): makes the module, in plain torch.nn, float64."""
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
    resets_optimizers: bool = False
    averages_optimizers: bool = False
    """Whether what the optimizers of averaged parts remember is averaged with the weights, and comes down with them."""
    """Whether a client starts each of its rounds (SL, CPSL: turns) with a new optimizer, and so does the copy of the
    server part that is its own."""
    upload_every: int = 2
    align_every: int = 2
    align_rounds: tuple[int, ...] = ()
    """If not empty, the rounds that align, instead of every `align_every`-th."""
    align_until: int = 2**31
    align_when: str = "due"
    """"due", or "drift": at the end of a round, at most every `align_every` rounds, where the mean cosine is below
    `align_below`: of the estimated and the true cut gradients of the last 24 samples of a client's newest upload, if
    that came after its last alignment. There are at most three clients, so all are looked at."""
    align_below: float = 0.6
    align_at: str = "end"
    """"end" or "start" of a round."""
    warm_start: bool = False
    local_auxiliary: bool = False
    alignment: Alignment = field(default_factory=Alignment)
    ridge: Ridge | None = None
    hold: float = 0.0
    """How strongly a client's activations are pulled to those of the weights with which it got its auxiliary."""
    token_rows: bool = False
    """Whether loss terms are the tokens of texts, [B, L], and not samples."""
    hands_on_optimizer: bool = False
    """SL, CPSL: whether the state of the client part's optimizer travels with x_c."""
    alternate: bool = False
    """SL: alternate mini-batches, one batch of each client in turn."""
    shared_server: bool = False
    """Local-loss SplitFed: one server part for all clients, instead of a copy for each."""
    average_every: int = 1
    """LocFedMix-SL (T_c) and AdaptSFL (I): the F-server averages at the end of each round t with (t + 1) % this = 0."""
    mixing: Mapping[tuple[int, int], Mixing] = field(default_factory=dict)
    """LocFedMix-SL: by (round, step), what is mixed. A client that is not named, or has no partner, is not mixed; all
    that are named, partners too, have a batch in this step."""
    decoder_lr: float = 1e-3
    """LocFedMix-SL. There are decoders if there is a part "decoder", from activations to inputs."""
    clusters: list[list[list[int]]] = field(default_factory=list)
    """CPSL: by round, the clusters in the order of their turns, each with its members in ascending order. Together they
    are the round's cohort."""
    own_reply: bool = False
    """CPSL: whether the reply is the gradient of a member's own mean loss, and not its slice of the cluster's."""
    cuts: list[int] = field(default_factory=list)
    """AdaptSFL: by client, how many blocks it holds, at least 1. Then the model is one part "blocks", made as an
    nn.Sequential, and there are no parts "client" and "server". Empty: one cut for all, between those two parts."""
    distillation: Distillation | None = None
    """FedGKT, which has no use for `batches`. The head of a client is its part "auxiliary"."""
    direction: Callable[[int, int, int], Tensor] | None = None
    """HERON: by (round, client, step), u: one flat vector over the trained weights of "client", then those of
    "auxiliary", each in the order of parameters() and flattened row by row. Of length 1, which is not checked."""
    smoothing: float = 1e-3
    """HERON: μ."""
    proximal: float = 0.0
    """FedProx: μ."""
    f_server_optimizer: FServerOptimizer | None = None
    """FedOpt and two-sided learning rates. None: the average as it is."""
    scaffold: bool = False


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
    clients: dict[int, Tensors] = field(default_factory=dict)
    """By client: the client part that it would use in the next round, in algorithms where clients differ in that. Under
    the names of "blocks" where there are cuts."""
    decoders: dict[int, Tensors] = field(default_factory=dict)
    """LocFedMix-SL, by client: the decoder that it would use in the next round."""
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """FedGKT, by (client, example): the newest logits [1, C] that the server has sent."""
    controls: dict[int, dict[str, Tensors]] = field(default_factory=dict)
    """SCAFFOLD, by client and part: c_i, after the last round; client -1: c."""

"""What an algorithm is: what each of the three roles does, and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fsl_sage.config import AveragingConfig, Config, option
from fsl_sage.errors import InputError
from fsl_sage.roles.protocols import ClientRole, FServerRole, SServerRole, Update
from fsl_sage.split import random_features
from fsl_sage.wire.message import AUXILIARY, CLIENT_MODEL, DECODER, FULL_MODEL, Message, Tensors

LocalRound = Generator[Message, Message | None, None]
"""A client's round: yields uploads; what is sent back into it is the S-server's reply, if there is one."""


@dataclass(frozen=True)
class NoOptions:
    """The options of an algorithm that has none of its own."""


class Algorithm(ABC):
    """What clients, F-server and S-server do in a round. Derive from it to write an algorithm.

    Only `local_round` is required. Its methods are called with the roles of `roles/protocols.py`; an engine carries the
    messages between them.
    """

    # What it is called and what can be chosen

    title: ClassVar[str] = ""
    """Its name in reports; that on the command line if not given. It is not inherited."""
    colour: ClassVar[str | None] = None
    """Its colour in figures, such as #0072B2; one of a palette if not given. It is not inherited."""
    Options: ClassVar[type] = NoOptions
    """Its own options: a frozen dataclass, whose docstrings are the help texts. They are `self.options`."""
    uses: ClassVar[tuple[str, ...]] = (
        "alignment",
        "lora.auxiliary",
        "model.auxiliary",
        "optimizer.auxiliary_weight_decay",
        "optimizer.server_lr",
    )
    """Which shared options and groups it reads, of those listed here, which not every algorithm reads."""
    not_compared: ClassVar[tuple[str, ...]] = ()
    """Own options that have their defaults in a comparison, because another algorithm stands for them."""
    moves_like: ClassVar[str | None] = None
    """An algorithm whose rounds move the same bytes, so that it needs no column of its own in `fsl-sage cuts`."""
    in_cost: ClassVar[Mapping[str, Any]] = {}
    """Own options for `fsl-sage cost`, which plays two rounds: a round that aligns, and one as most rounds are."""

    averages_with: ClassVar[Mapping[str, Any]] = {}
    """Options of the group `averaging` that it sets itself: FedProx sets `proximal`."""

    # What it asks of an engine

    waits: bool = False
    """Whether clients wait for the S-server's reply to an upload."""
    averaged: tuple[str, ...] = ("client",)
    """The parts of the model that the F-server averages: client, auxiliary, server."""
    holds: tuple[str, ...] = ("client",)
    """The parts that a client holds. A "decoder", from smashed data back to inputs, is made for those who hold one."""
    own_parts: tuple[str, ...] = ()
    """The parts that each client trains for itself. They are never averaged, so there is no merged model: it is
    evaluated as the mean over the clients, each with its own parts."""
    takes_two_cuts: bool = False
    """Whether it can run a U-shape, whose last part, the head, is back at the client."""
    one_cut_because: ClassVar[str] = "its F-server averages client parts of the same layers"
    """Why all clients have the same cut; empty where each may have its own."""
    own_optimizers_because: ClassVar[str | None] = None
    """Why what clients' optimizers remember cannot be averaged with the weights; None where it can."""
    client_cuts: tuple[str, ...] = ()
    """The cut of each client, where each has its own."""
    client_memories: tuple[float, ...] = ()
    """Bytes of memory of each client, where its cut is to be planned by that."""
    has_s_server: bool = True
    """Whether an S-server holds the server part (not in FedAvg)."""
    stores_uploads: bool = False
    """Whether the S-server keeps the newest uploads."""
    takes_estimators: bool = False
    """Whether an auxiliary may be one without a loss, a ridge: clients neither train it nor look at its output."""
    in_turn: bool = False
    """Whether a client gets the averaged weights when its turn comes, and not when the round ends. So there is one
    transfer down and one up for each turn, and no first download of what is averaged."""
    waits_for: str = "the S-server's answer to every batch"
    """What clients wait for, where they do."""

    without_averaging: ClassVar[Mapping[str, str]] = {}
    """Options of the group `averaging` that have nothing to act on here, each with the reason."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options: Any = self.Options() if config.options is None else config.options
        given = {name: getattr(config.averaging, name) for name in self.averages_with}
        own = {name: value for name, value in self.averages_with.items() if given[name] is None or given[name] is False}
        self.averaging: AveragingConfig = replace(config.averaging, **own)
        """The options of averages and corrections: those that are given, and those for which it stands."""
        if (
            "auxiliary" in self.holds
            and not self.takes_estimators
            and random_features(config.model.auxiliary) is not None
        ):
            raise InputError(
                f"--model.auxiliary {config.model.auxiliary} cannot run with {config.algorithm}: its clients train "
                "auxiliaries on a loss, and a ridge auxiliary has none, only estimates of the cut gradients. Give "
                "--model.auxiliary blocks:1, or --algorithm fsl-sage."
            )
        self.labels_stay = len(config.model.cuts) == 2
        """A U-shape: the client has the head too, computes the loss itself and keeps its labels."""
        if self.labels_stay:
            self.averaged = (*self.averaged, "head")
            self.holds = (*self.holds, "head")

    @classmethod
    def reads(cls, path: str) -> bool:
        """Whether a shared option, such as `alignment.steps` or `rounds`, can change a run of this algorithm."""
        return _covers(cls.uses, path) or not _covers(Algorithm.uses, path)

    @property
    def answers_one_by_one(self) -> bool:
        """Whether a local step has one upload, and the reply to it depends on no other upload of that step.

        An engine may then let a client end its step before the next one begins it. `local_round` yields PAUSE after
        each step, so that a client holds no graph while others take theirs.
        """
        return False

    @property
    def clients_are_apart(self) -> bool:
        """Whether clients that wait have nothing to do with each other before the round ends.

        Each has a server-side model of its own. An engine may then let some of them end their round before others
        begin it, to the same bits, and fold their models into the average (`SServerRole.fold_copy`).
        """
        return False

    @property
    def sends_less(self) -> bool:
        """Whether a run may send fewer bytes than `fsl-sage cost` says, because that depends on what was learnt."""
        return False

    @property
    def sends_optimizers(self) -> bool:
        """Whether what clients' optimizers remember of averaged parts goes to the F-server and comes back averaged."""
        return self.config.client_optimizer == "average" and self.own_optimizers_because is None

    def check(self) -> None:
        """Raise an InputError for options that cannot run together. `fsl-sage cost` does not need it."""
        self._check_optimizers()
        for name, reason in self.without_averaging.items():
            if getattr(self.averaging, name) != getattr(AveragingConfig(), name):
                raise InputError(
                    f"{option(f'averaging.{name}')} cannot run with {self.config.algorithm}: {reason}. Leave it out."
                )
        for name, value in self.averages_with.items():
            if name == "optimizer" and self.averaging.optimizer != value:
                raise InputError(
                    f"{self.config.algorithm} is FedAvg with --averaging.optimizer {value}: with "
                    f"{self.averaging.optimizer} give --algorithm fedavg."
                )
        if not self.averaging.control_variates:
            return
        if self.config.optimizer.name != "sgd":
            raise InputError(
                f"Control variates cannot run with --optimizer.name {self.config.optimizer.name}: a client's control "
                "is its mean gradient, found by dividing the change of its weights by its learning rates, and Adam's "
                "steps are not gradients times a learning rate. Give --optimizer.name sgd with a learning rate for it, "
                "such as --optimizer.lr 0.01."
            )
        if self.averaging.rule != "mean":
            raise InputError(
                f"Control variates cannot run with --averaging.rule {self.averaging.rule}: the mean of the controls "
                "would let through the one client that the rule is to stop. Give --averaging.rule mean."
            )

    def _check_optimizers(self) -> None:
        """Refuse averages of optimizers where there are none to be averaged, or no mean."""
        if self.config.client_optimizer != "average":
            return
        if self.own_optimizers_because is not None:
            raise InputError(
                f"--client-optimizer average cannot run with {self.config.algorithm}: {self.own_optimizers_because}. "
                "Give --client-optimizer keep or reset."
            )
        if self.averaging.rule != "mean":
            raise InputError(
                f"--client-optimizer average cannot run with --averaging.rule {self.averaging.rule}: the mean of the "
                "optimizers would let through the one client that the rule is to stop. Give --client-optimizer keep "
                "or reset."
            )

    def remark(self) -> str | None:
        """A warning about a run with these options, if there is one. The run starts anyway."""
        momentum = self.config.optimizer.momentum
        if self.averaging.control_variates and momentum:
            return (
                f"Control variates with --optimizer.momentum {momentum:g}: momentum carries the weights up to "
                f"{1 / (1 - momentum):g} times as far as gradients would, and the controls are larger by that factor. "
                "They move the weights beside the momentum, as in published tables; SCAFFOLD's proof has no momentum."
            )
        return None

    @abstractmethod
    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """At the client: its local steps in round t.

        Args:
            client: The client, with its batches, parts and optimizers.
            t: The round, from 0.

        Yields:
            Uploads for the S-server. If clients wait, `yield` returns the S-server's reply, else None.
        """

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> Message | None:
        """At the S-server: take one upload.

        Args:
            server: The S-server.
            client: The number of the client that sent it.
            upload: What `local_round` yielded, with the value `step`, the number of the local step.

        Returns:
            The reply to the client, if clients wait.
        """
        raise NotImplementedError(f"{type(self).__name__} uploads but does not say what its S-server does with it")

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """At the S-server: take the uploads of one local step, by client; returns the replies by client.

        By default they are taken one by one with `on_upload`.
        """
        return {client: self.on_upload(server, client, upload) for client, upload in uploads.items()}

    def aggregate(self, f_server: FServerRole, updates: Sequence[Update]) -> dict[str, Tensors]:
        """At the F-server: average the clients' updates; returns the new weights by part."""
        return f_server.mean(updates)

    def end_of_round(self, server: SServerRole, t: int) -> Iterator[tuple[int, Message]]:
        """At the S-server, after the averaging: yields (client, message) pairs, such as aligned auxiliaries."""
        return iter(())

    def on_download(self, client: ClientRole, message: Message) -> None:
        """At the client, at the start of its round: take a message of `end_of_round`."""
        if AUXILIARY in message.parts:
            client.replace("auxiliary", dict(message.parts[AUXILIARY]))

    def on_update(self, client: ClientRole, t: int) -> Mapping[str, Tensors]:
        """At the client, at the end of its round: arrays by kind and name that go to the F-server with its update.

        `aggregate` finds them in `Update.extra`. What it puts into `FServerRole.sends` goes to the clients with the
        next averaged weights, where it is `ClientRole.received_extra`.
        """
        return {}

    def turns(self, t: int, cohort: Sequence[int], steps: Mapping[int, int]) -> list[Sequence[int]]:
        """Groups of the cohort that train one after the other in round t; the F-server averages after each.

        Args:
            t: The round.
            cohort: The clients that take part in it, in ascending order.
            steps: By client, the number of its local steps in a round.
        """
        return [cohort]

    def averaged_in(self, t: int) -> tuple[str, ...]:
        """The parts averaged in round t."""
        return self.averaged

    def trained_in(self, t: int) -> tuple[str, ...]:
        """The parts that a client trains in round t: those that are averaged, and its own."""
        return (*self.averaged_in(t), *self.own_parts)

    def waits_in(self, t: int) -> bool:
        """Whether clients wait for the S-server's replies in round t."""
        return self.waits

    def kind(self, part: str) -> str:
        """The kind under which the ledger bills a part. If the server part travels too, it is `full model`."""
        if part in (AUXILIARY, DECODER):
            return part
        return FULL_MODEL if "server" in self.averaged else CLIENT_MODEL


def _covers(options: Sequence[str], path: str) -> bool:
    """Whether an option is one of these, or in one of these groups."""
    return any(path == name or path.startswith(f"{name}.") for name in options)

"""What an algorithm is: what each of the three roles does, and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.roles.protocols import ClientRole, FServerRole, SServerRole, Update
from fsl_sage.wire.message import AUXILIARY, CLIENT_MODEL, FULL_MODEL, Message, Tensors

LocalRound = Generator[Message, Message | None, None]
"""A client's round: yields uploads; what is sent back into it is the S-server's reply, if there is one."""


class Algorithm(ABC):
    """A conversation between clients, F-server and S-server; engines carry it without knowing which one it is."""

    waits: bool = False
    """Whether clients wait for the S-server's reply to an upload."""
    averaged: tuple[str, ...] = ("client",)
    """The parts of the model that the F-server averages: client, auxiliary, server."""
    holds: tuple[str, ...] = ("client",)
    """The parts that a client holds."""
    takes_two_cuts: bool = False
    """Whether it can run a U-shape, whose last part, the head, is back at the client."""
    has_s_server: bool = True
    """Whether an S-server holds the server part (not in FedAvg)."""
    stores_uploads: bool = False
    """Whether the S-server keeps the newest uploads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        if config.model.recalibrate and not self.stores_uploads:
            raise InputError(
                f"--model.recalibrate needs stored uploads, and {config.algorithm} keeps none: "
                "give fsl-sage or cse-fsl."
            )
        self.labels_stay = len(config.model.cuts) == 2
        """A U-shape: the client has the head too, computes the loss itself and keeps its labels."""
        if self.labels_stay:
            if not self.takes_two_cuts:
                raise InputError(
                    f"{config.algorithm} takes one cut, not {config.model.cut}: its S-server computes the loss. "
                    "U-shapes run with splitfed-ms, splitfed-ss and fedavg."
                )
            self.averaged = (*self.averaged, "head")
            self.holds = (*self.holds, "head")

    @abstractmethod
    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """At the client: its local steps of round t."""

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> Message | None:
        """At the S-server: take one upload, and answer it if clients wait."""
        raise NotImplementedError(f"{type(self).__name__} uploads but does not say what its S-server does with it")

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """At the S-server: take all clients' uploads of one step. One by one, unless an algorithm says otherwise."""
        return {client: self.on_upload(server, client, upload) for client, upload in uploads.items()}

    def aggregate(self, f_server: FServerRole, updates: Sequence[Update]) -> dict[str, Tensors]:
        """At the F-server: the new weights by part."""
        return f_server.mean(updates)

    def end_of_round(self, server: SServerRole, t: int) -> Iterator[tuple[int, Message]]:
        """At the S-server, after the averaging: messages for clients."""
        return iter(())

    def on_download(self, client: ClientRole, message: Message) -> None:
        """At the client, at the start of its round: a message that waited for it."""
        if AUXILIARY in message.parts:
            client.replace("auxiliary", dict(message.parts[AUXILIARY]))

    def on_update(self, client: ClientRole, t: int) -> Mapping[str, Tensors]:
        """At the client, at the end of its round: named arrays by kind that go to the F-server with its update.

        `aggregate` finds them in `Update.extra`. What it puts into `FServerRole.sends` goes to the clients with the
        next averaged weights, where it is `ClientRole.received_extra`.
        """
        return {}

    def groups(self, cohort: Sequence[int]) -> list[Sequence[int]]:
        """Groups of the cohort that run one after the other, averaged after each."""
        return [cohort]

    def averaged_in(self, t: int) -> tuple[str, ...]:
        """The parts averaged in round t."""
        return self.averaged

    def trained_in(self, t: int) -> tuple[str, ...]:
        """The parts that a client trains in round t: those that are averaged."""
        return self.averaged_in(t)

    def waits_in(self, t: int) -> bool:
        """Whether clients wait for the S-server's replies in round t."""
        return self.waits

    def kind(self, part: str) -> str:
        """The ledger's kind for a part; where the server part travels too it is the full model."""
        if part == "auxiliary":
            return AUXILIARY
        return FULL_MODEL if "server" in self.averaged else CLIENT_MODEL

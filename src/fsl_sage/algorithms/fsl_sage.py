"""FSL-SAGE, Algorithms 1-3 of the paper."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.config import FROM_ZERO, ROUND, WHOLE, Config, check_ranges
from fsl_sage.errors import InputError
from fsl_sage.roles.protocols import ClientRole, SServerRole
from fsl_sage.split import random_features
from fsl_sage.wire.message import Message, Smashed


@dataclass(frozen=True)
class FSLSAGEOptions:
    """What can be chosen; how an alignment trains is in the group `alignment`."""

    upload_every: int = field(default=5, metadata={"unit": "steps"})
    """Upload smashed data at every q-th local step."""
    align_every: int = field(default=5, metadata={"label": "alignment interval", "unit": "rounds"})
    """Align the auxiliaries every l rounds."""
    align_until: int | None = field(default=None, metadata={"unit": "rounds"})
    """The last round T' that may align; required by lazy-fsl-sage."""
    align_rounds: tuple[int, ...] = ()
    """Align in these rounds, instead of every l rounds."""
    align_when: Literal["due", "drift"] = "due"
    """drift: align, at most every l rounds, only the auxiliaries whose held-out fidelity has fallen below
    --align-below."""
    align_below: float = 0.6
    """With --align-when drift: the cosine of estimated and true cut gradients below which an auxiliary is aligned."""
    align_at: Literal["end", "start"] = "end"
    """Align after the round's averaging, as in Algorithm 3, or after the clients' first upload; they then wait for the
    auxiliary aligned on it."""
    warm_start: bool = False
    """Let the clients train the auxiliaries in round 0 as in CSE-FSL."""
    local_auxiliary: bool = False
    """Let the clients train their auxiliaries on their own loss between alignments, and keep them."""
    hold: float = 0.0
    """How strongly a client is held near the weights that it had when it got its auxiliary, whose estimates are good
    only near them: this times (z - z_0) / rms(z_0)^2 is added to them; 0 is not at all."""

    def __post_init__(self) -> None:
        below = ("a number from -1 to 1", -1, 1)
        ranges = {"upload_every": WHOLE, "align_every": WHOLE, "align_until": ROUND, "align_below": below}
        check_ranges(self, {**ranges, "hold": FROM_ZERO})
        if any(t < 0 for t in self.align_rounds):
            raise InputError(f"--align-rounds {min(self.align_rounds)} is not possible: give rounds from 0 up.")
        if self.align_when == "drift" and (self.align_at == "start" or self.align_rounds):
            other = "--align-at start" if self.align_at == "start" else "--align-rounds"
            raise InputError(
                f"--align-when drift cannot run with {other}: which round aligns is known only when it ends. "
                "Give one of them."
            )
        if self.align_at == "start" and self.warm_start:
            raise InputError(
                "--warm-start cannot run with --align-at start: in round 0 the clients would train auxiliaries that "
                "have just been aligned. Give one of them."
            )


class FSLSAGE(Algorithm):
    """Clients train against auxiliaries that the S-server periodically aligns with itself."""

    title = "FSL-SAGE"
    colour = "#0072B2"
    Options = FSLSAGEOptions
    options: FSLSAGEOptions
    not_compared: ClassVar[tuple[str, ...]] = ("align_until",)  # with it, it is Lazy FSL-SAGE
    in_cost: ClassVar[Mapping[str, Any]] = {
        "align_every": 2,
        "align_rounds": (),
        "align_until": 2,
        "align_when": "due",
        "warm_start": False,
    }

    waits = False  # its clients never wait for the S-server, but once in a round that aligns with --align-at start
    averaged = ("client",)
    holds = ("client", "auxiliary")
    stores_uploads = True
    takes_estimators = True  # its clients need the auxiliary's gradients alone, not a loss
    waits_for = "the auxiliary in the middle of a round, by --align-at start"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.options.align_at == "start" and config.order != "interleaved":
            raise InputError(
                f"--align-at start cannot run with --order {config.order}: all clients upload before the alignment. "
                "Give --order interleaved."
            )
        self.fits = random_features(config.model.auxiliary) is not None
        """Whether the auxiliary is fitted to z_b in closed form, and not trained."""
        if self.fits:
            self._check_fitted()
        self.upload_every = self.options.upload_every  # K / Q
        self.align_every = self.options.align_every  # l
        self.align_until = config.rounds if self.options.align_until is None else self.options.align_until  # T'

    def _check_fitted(self) -> None:
        """Refuse what a ridge auxiliary cannot do."""
        auxiliary = f"--model.auxiliary {self.config.model.auxiliary}"
        trained = {"--warm-start": self.options.warm_start, "--local-auxiliary": self.options.local_auxiliary}
        for name in (name for name, given in trained.items() if given):
            raise InputError(f"{name} cannot run with {auxiliary}: it has no loss that a client could train it by.")
        if self.config.alignment.loss == "cosine":
            raise InputError(
                f"--alignment.loss cosine cannot run with {auxiliary}: its closed form is that of the squared "
                "distance. Give --alignment.loss squared."
            )
        if self.config.model.recalibrate:
            raise InputError(
                f"--model.recalibrate cannot run with {auxiliary}: its uploads become sums and are not stored."
            )

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """Algorithm 1, lines 8-16."""
        for k, batch in enumerate(client.batches(t)):
            z = client.forward(batch)
            if k % self.upload_every == 0:
                reply = yield Smashed(z, batch.target)
                if reply is not None:  # line 4 with --align-at start: x_a from the S-server
                    self.on_download(client, reply)
            estimate = client.auxiliary_gradient(z, batch.target)
            if self.options.hold:
                estimate = client.held(batch, z, estimate, self.options.hold)
            client.backward(z, estimate)
            client.step()

    def on_download(self, client: ClientRole, message: Message) -> None:
        """Algorithm 1, line 4: x_a. With --hold it is good near the client's weights of this moment."""
        super().on_download(client, message)
        if self.options.hold:
            client.take_hold()

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> None:
        """Algorithm 3, lines 4-7."""
        gradients = server.learn(client, upload, cut_gradient=self.fits)
        server.remember(client, upload, gradients)

    def end_of_round(self, server: SServerRole, t: int) -> Iterator[tuple[int, Message]]:
        """Algorithm 3, lines 9-13: align the auxiliary of every client that has alignment data."""
        if self.options.align_when == "drift":
            if t <= self.align_until:
                yield from server.align(server.drifted(self.options.align_below, self.align_every))
        elif self.aligns(t) and not self.waits_in(t):
            yield from server.align(server.remembered())

    @property
    def sends_less(self) -> bool:
        """Alignments that are not needed are left out."""
        return self.options.align_when == "drift"

    def check(self) -> None:
        """Refuse differences from an auxiliary that the S-server does not know."""
        super().check()
        if self.options.local_auxiliary and self.config.codec.word("auxiliary") != "none":
            raise InputError(
                f"--codec.auxiliary {self.config.codec.word('auxiliary')} cannot run with --local-auxiliary: what is "
                "sent is the difference from the auxiliary that the client has, and it trains that itself. Give "
                "--codec.auxiliary none."
            )

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """With --align-at start the first uploads of a round are answered with the auxiliaries aligned on them."""
        replies = super().on_uploads(server, uploads)
        if self.waits_in(server.round) and all(upload.values["step"] == 0 for upload in uploads.values()):
            aligned = dict(server.align(server.remembered()))
            replies = {client: aligned.pop(client, None) for client in uploads}
            server.replied |= {client: reply for client, reply in replies.items() if reply is not None}
            server.left += aligned.items()  # for the others, when they come
        return replies

    def aligns(self, t: int) -> bool:
        """Whether round t aligns: t = 0 mod l, or one of the rounds that are named, and t <= T'."""
        named = self.options.align_rounds
        return (t in named if named else t % self.align_every == 0) and t <= self.align_until

    def waits_in(self, t: int) -> bool:
        """With --align-at start the clients of a round that aligns wait once, for the auxiliary."""
        return self.options.align_at == "start" and self.aligns(t)

    def trained_in(self, t: int) -> tuple[str, ...]:
        """With --local-auxiliary the clients train their auxiliaries too, and keep them to themselves."""
        return ("client", "auxiliary") if self.options.local_auxiliary else self.averaged_in(t)

    def averaged_in(self, t: int) -> tuple[str, ...]:
        """With a warm start the clients train the auxiliaries themselves in round 0, as in CSE-FSL."""
        return ("client", "auxiliary") if t == 0 and self.options.warm_start else self.averaged

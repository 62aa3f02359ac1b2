"""FSL-SAGE, Algorithms 1-3 of the paper."""

from collections.abc import Iterator, Mapping

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.config import Config
from fsl_sage.roles.protocols import ClientRole, SServerRole
from fsl_sage.wire.message import Message, Smashed


class FSLSAGE(Algorithm):
    """Clients train against auxiliaries that the S-server periodically aligns with itself.

    Lazy FSL-SAGE is this with T' < T (`--align-until`), nothing more.
    """

    waits = False  # its clients never wait for the S-server, but once in a round that aligns with --align-at start
    averaged = ("client",)
    holds = ("client", "auxiliary")
    stores_uploads = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.upload_every = config.upload_every  # K / Q
        self.align_every = config.align_every  # l
        self.align_until = config.rounds if config.align_until is None else config.align_until  # T'

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """Algorithm 1, lines 8-16."""
        for k, batch in enumerate(client.batches(t)):
            z = client.forward(batch)
            if k % self.upload_every == 0:
                reply = yield Smashed(z, batch.target)
                if reply is not None:  # line 4 with --align-at start: x_a from the S-server
                    self.on_download(client, reply)
            client.backward(z, client.auxiliary_gradient(z, batch.target))
            client.step()

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> None:
        """Algorithm 3, lines 4-7."""
        server.learn(client, upload)
        server.remember(client, upload)

    def end_of_round(self, server: SServerRole, t: int) -> Iterator[tuple[int, Message]]:
        """Algorithm 3, lines 9-13: align the auxiliary of every client that has alignment data."""
        if self.aligns(t) and not self.waits_in(t):
            yield from server.align(server.remembered())

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """With --align-at start the first uploads of a round are answered with the auxiliaries aligned on them."""
        replies = super().on_uploads(server, uploads)
        if self.waits_in(server.round) and all(upload.values["step"] == 0 for upload in uploads.values()):
            aligned = dict(server.align(server.remembered()))
            replies = {client: aligned.pop(client, None) for client in uploads}
            server.left += aligned.items()  # for the others, when they come
        return replies

    def aligns(self, t: int) -> bool:
        """Whether round t aligns: t = 0 mod l, or one of the rounds that are named, and t <= T'."""
        named = self.config.align_rounds
        return (t in named if named else t % self.align_every == 0) and t <= self.align_until

    def waits_in(self, t: int) -> bool:
        """With --align-at start the clients of a round that aligns wait once, for the auxiliary."""
        return self.config.align_at == "start" and self.aligns(t)

    def trained_in(self, t: int) -> tuple[str, ...]:
        """With --local-auxiliary the clients train their auxiliaries too, and keep them to themselves."""
        return ("client", "auxiliary") if self.config.local_auxiliary else self.averaged_in(t)

    def averaged_in(self, t: int) -> tuple[str, ...]:
        """With a warm start the clients train the auxiliaries themselves in round 0, as in CSE-FSL."""
        return ("client", "auxiliary") if t == 0 and self.config.warm_start else self.averaged

"""FSL-SAGE, Algorithms 1-3 of the paper."""

from collections.abc import Iterator

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.config import Config
from fsl_sage.roles.client import Client
from fsl_sage.roles.s_server import SServer
from fsl_sage.wire.message import Message, Smashed


class FSLSAGE(Algorithm):
    """Clients train against auxiliaries that the S-server periodically aligns with itself.

    Lazy FSL-SAGE is this with T' < T (`--align-until`), nothing more.
    """

    waits = False  # its clients never wait for the S-server
    averaged = ("client",)
    holds = ("client", "auxiliary")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.upload_every = config.upload_every  # K / Q
        self.align_every = config.align_every  # l
        self.align_until = config.rounds if config.align_until is None else config.align_until  # T'

    def local_round(self, client: Client, t: int) -> LocalRound:
        """Algorithm 1, lines 8-16."""
        for k, batch in enumerate(client.batches(t)):
            z = client.forward(batch)
            if k % self.upload_every == 0:
                yield Smashed(z, batch.target)  # nobody waits for an answer
            client.backward(z, client.auxiliary_gradient(z, batch.target))
            client.step()

    def on_upload(self, server: SServer, client: int, upload: Message) -> None:
        """Algorithm 3, lines 4-7."""
        server.learn(client, upload)
        server.remember(client, upload)

    def end_of_round(self, server: SServer, t: int) -> Iterator[tuple[int, Message]]:
        """Algorithm 3, lines 9-13: align the auxiliary of every client that has alignment data."""
        if t % self.align_every == 0 and t <= self.align_until:
            yield from server.align(sorted(server.alignment))

    def averaged_in(self, t: int) -> tuple[str, ...]:
        """With a warm start the clients train the auxiliaries themselves in round 0, as in CSE-FSL."""
        return ("client", "auxiliary") if t == 0 and self.config.warm_start else self.averaged

"""CSE-FSL (Mu and Shen, 2023): auxiliaries trained by the clients on their own loss."""

from dataclasses import dataclass, field
from typing import ClassVar

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.config import WHOLE, check_ranges
from fsl_sage.roles.protocols import ClientRole, SServerRole
from fsl_sage.wire.message import Message, Smashed


@dataclass(frozen=True)
class CSEFSLOptions:
    """What can be chosen."""

    upload_every: int = field(default=5, metadata={"unit": "steps"})
    """Upload smashed data at every q-th local step."""

    def __post_init__(self) -> None:
        check_ranges(self, {"upload_every": WHOLE})


class CSEFSL(Algorithm):
    """Clients train client part and auxiliary together; both are averaged. Nothing comes back from the S-server."""

    title = "CSE-FSL"
    colour = "#D55E00"
    Options = CSEFSLOptions
    options: CSEFSLOptions
    uses: ClassVar[tuple[str, ...]] = (
        "alignment.samples",  # by which the auxiliary's fidelity is measured
        "alignment.total_samples",
        "lora.auxiliary",
        "model.auxiliary",
        "optimizer.auxiliary_weight_decay",
        "optimizer.server_lr",
    )
    waits = False
    averaged = ("client", "auxiliary")
    holds = ("client", "auxiliary")
    stores_uploads = True

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """Local steps on the auxiliary's loss; every q-th batch is uploaded for the server part to learn from."""
        for k, batch in enumerate(client.batches(t)):
            z = client.forward(batch)
            if k % self.options.upload_every == 0:
                yield Smashed(z, batch.target)
            client.backward(z, client.auxiliary_gradient(z, batch.target))
            client.step()

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> None:
        """The server part learns; the upload is kept only to measure the auxiliary's fidelity."""
        server.learn(client, upload)
        server.remember(client, upload)

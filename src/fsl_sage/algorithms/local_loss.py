"""Local-loss SplitFed (Han et al., 2021): clients learn from an auxiliary, the S-server from all that they send."""

from collections.abc import Iterator
from dataclasses import dataclass

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.roles.protocols import ClientRole, SServerRole
from fsl_sage.wire.message import Message, Smashed


@dataclass(frozen=True)
class LocalLossOptions:
    """What can be chosen."""

    shared_server: bool = False
    """One server-side model for all clients, instead of a copy for each: CSE-FSL that uploads at every step."""


class LocalLoss(Algorithm):
    """SplitFed-MS whose clients do not wait: their gradients come from an auxiliary that they train."""

    title = "Local loss"
    colour = "#8C564B"
    own_optimizers_because = "its S-server has a model, and an optimizer of it, for each client"
    Options = LocalLossOptions
    options: LocalLossOptions
    uses = (
        "lora.auxiliary",
        "model.auxiliary",
        "optimizer.auxiliary_weight_decay",
        "optimizer.server_lr",
    )
    waits = False
    averaged = ("client", "auxiliary")
    holds = ("client", "auxiliary")

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """Local steps on the auxiliary's loss; every batch goes up, as it was before the step."""
        for batch in client.batches(t):
            z = client.forward(batch)
            yield Smashed(z, batch.target)
            client.backward(z, client.auxiliary_gradient(z, batch.target))
            client.step()

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> None:
        """The client's copy of the server part learns; nothing comes back."""
        server.learn(client, upload, own_copy=not self.options.shared_server)

    def end_of_round(self, server: SServerRole, t: int) -> Iterator[tuple[int, Message]]:
        """Average the copies; no message to anyone."""
        if not self.options.shared_server:
            server.average_copies()
        return iter(())

"""What the two SplitFed systems (Thapa et al., 2022) have in common: clients wait for the true cut gradients."""

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.roles.client import Client
from fsl_sage.wire.message import Smashed


class SplitFed(Algorithm):
    """Every local step is a step of the whole model, split over client and S-server."""

    waits = True
    averaged = ("client",)
    holds = ("client",)

    def local_round(self, client: Client, t: int) -> LocalRound:
        """Every batch goes up, and its cut gradients come down."""
        for batch in client.batches(t):
            z = client.forward(batch)
            reply = yield Smashed(z, batch.target)
            assert reply is not None
            client.backward(z, reply.cut_gradients)
            client.step()

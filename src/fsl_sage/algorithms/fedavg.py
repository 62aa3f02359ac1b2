"""FedAvg (McMahan et al., 2017): every client trains a full copy of the model."""

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.roles.protocols import ClientRole


class FedAvg(Algorithm):
    """No S-server: both parts are at the client, both are averaged. The cut is only where its two parts meet."""

    title = "FedAvg"
    colour = "#E69F00"
    uses = ()
    waits = False
    averaged = ("client", "server")
    holds = ("client", "server")
    takes_two_cuts = True
    has_s_server = False
    one_cut_because = "each of its clients holds the whole model"

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """Ordinary local steps of the whole model; nothing is uploaded before the round ends."""
        for batch in client.batches(t):
            z = client.forward(batch)
            client.backward(z, client.server_gradient(z, batch.target))
            client.step()
        yield from ()

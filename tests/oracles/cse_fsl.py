"""CSE-FSL: clients train client part and auxiliary on the auxiliary's loss; the S-server learns from some uploads."""

from torch import Tensor

from tests.oracles.common import (
    Client,
    FServer,
    Ledger,
    backward_and_step,
    cohort_of,
    interleaved,
    new_clients,
    new_optimizer,
    new_part,
    state,
)
from tests.oracles.given import Found, Given, Target


def cse_fsl(given: Given) -> Found:
    held = ("client", "auxiliary")
    clients = new_clients(given, held)
    server = new_part(given, "server")
    server_optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)
    ledger = Ledger()
    f_server = FServer(given, ledger, {"client model": ("client",), "auxiliary": ("auxiliary",)}, held)
    f_server.first_download()
    for t in range(given.rounds):
        cohort = cohort_of(given, clients, t)
        for client in cohort:
            f_server.send_newest(t, client)
        for k, present in interleaved(given, cohort, t):
            for client in present:
                inputs, target = given.batches[t, client.number, k]
                z = client.parts["client"](inputs)
                if k % given.upload_every == 0:
                    ledger.bill_upload(t, client.number, z, target)
                    backward_and_step(given.loss(server(z.detach()), target), [server_optimizer])
                step_on_own_loss(given, client, z, target)
        f_server.aggregate(t, cohort)
    auxiliaries = dict.fromkeys(range(given.clients), f_server.newest["auxiliary"])
    return Found(
        f_server.newest["client"],
        state(given, "server", server),
        auxiliaries,
        dict(ledger.bytes),
        controls=f_server.all_controls(clients),
    )


def step_on_own_loss(given: Given, client: Client, z: Tensor, target: Target) -> None:
    """Client part and auxiliary both step on the auxiliary's loss."""
    loss = given.loss(client.parts["auxiliary"](z), target)
    backward_and_step(loss, [client.optimizers["client"], client.optimizers["auxiliary"]])

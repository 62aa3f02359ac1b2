"""FedAvg: every client trains a full copy of the model."""

from tests.oracles.common import FServer, Ledger, backward_and_step, cohort_of, interleaved, new_clients
from tests.oracles.given import Found, Given


def fedavg(given: Given) -> Found:
    held = ("client", "server")
    clients = new_clients(given, held)
    ledger = Ledger()
    f_server = FServer(given, ledger, {"full model": held}, held)
    f_server.first_download()
    for t in range(given.rounds):
        cohort = cohort_of(given, clients, t)
        for client in cohort:
            f_server.send_newest(t, client)
        for k, present in interleaved(given, cohort, t):
            for client in present:
                inputs, target = given.batches[t, client.number, k]
                output = client.parts["server"](client.parts["client"](inputs))
                backward_and_step(given.loss(output, target), client.optimizers.values())
        f_server.aggregate(t, cohort)
    return Found(
        f_server.newest["client"],
        f_server.newest["server"],
        {},
        dict(ledger.bytes),
        controls=f_server.all_controls(clients),
    )

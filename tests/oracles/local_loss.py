"""Local-loss SplitFed (Han et al. 2021): clients learn from an auxiliary's loss, the S-server from all that they send.

In each step a client computes z, sends z and y, and steps x_c and x_a on the loss through x_a. The S-server steps the
copy of x_s of this client on what it gets and does not reply. At the end of the round the F-server averages x_c and
x_a, and the S-server its copies. With `shared_server` there is one x_s for all, and it is CSE-FSL with an upload at
each step.

Left open by the specification, chosen here:
1. An upload happens at each step, whatever `upload_every` says.
2. z is made before the client's step, and the S-server learns from that z.
3. The S-server's copies are averaged as in SplitFed-MS: over the round's cohort, by the clients' weights, buffers too;
   all copies, also those of absent clients, go on from the average. Each copy's optimizer keeps its state for the whole
   run.
4. Step k of every client comes before step k + 1 of any (of importance only with `shared_server`).
5. Bytes are those of CSE-FSL: "activations", "labels", "client model", "auxiliary", and a "first download" of x_c and
   x_a.
"""

from tests.oracles.common import (
    FServer,
    Ledger,
    backward_and_step,
    cohort_of,
    interleaved,
    new_clients,
    new_optimizer,
    new_part,
    start_optimizers,
    state,
)
from tests.oracles.cse_fsl import step_on_own_loss
from tests.oracles.given import Found, Given
from tests.oracles.splitfed import average_servers


def local_loss(given: Given) -> Found:
    held = ("client", "auxiliary")
    clients = new_clients(given, held)
    servers = [new_part(given, "server") for _ in range(given.clients)]
    if given.shared_server:
        servers = servers[:1] * given.clients
    by_server = {server: new_optimizer(given, server, given.server_lr, given.weight_decay) for server in servers}
    ledger = Ledger()
    f_server = FServer(given, ledger, {"client model": ("client",), "auxiliary": ("auxiliary",)}, held)
    f_server.first_download()
    for t in range(given.rounds):
        cohort = cohort_of(given, clients, t)
        for client in cohort:
            f_server.send_newest(t, client)
            if not given.shared_server:
                start_optimizers(given, [by_server[servers[client.number]]])
        for k, present in interleaved(given, cohort, t):
            for client in present:
                inputs, target = given.batches[t, client.number, k]
                z = client.parts["client"](inputs)
                ledger.bill_upload(t, client.number, z, target)
                server = servers[client.number]
                backward_and_step(given.loss(server(z.detach()), target), [by_server[server]])
                step_on_own_loss(given, client, z, target)
        f_server.aggregate(t, cohort)
        average_servers(given, servers, given.cohorts[t])
    return Found(
        f_server.newest["client"],
        state(given, "server", servers[0]),
        dict.fromkeys(range(given.clients), f_server.newest["auxiliary"]),
        dict(ledger.bytes),
        controls=f_server.all_controls(clients),
    )

"""SplitFed: the S-server replies to every upload with the true cut gradient.

SS: one server part for all clients. MS: one for each client, and their average at the end of the round.
"""

from torch import Tensor, nn
from torch.optim import Optimizer

from tests.oracles.common import (
    FServer,
    Ledger,
    average,
    backward_and_step,
    cohort_of,
    interleaved,
    load,
    new_clients,
    new_optimizer,
    new_part,
    start_optimizers,
    state,
    step_on_cut_gradient,
)
from tests.oracles.given import Found, Given, Target


def splitfed_ss(given: Given) -> Found:
    server = new_part(given, "server")
    optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)
    return _splitfed(given, [server] * given.clients, [optimizer] * given.clients)


def splitfed_ms(given: Given) -> Found:
    servers = [new_part(given, "server") for _ in range(given.clients)]
    optimizers = [new_optimizer(given, server, given.server_lr, given.weight_decay) for server in servers]
    return _splitfed(given, servers, optimizers)


def _splitfed(given: Given, servers: list[nn.Module], optimizers: list[Optimizer]) -> Found:
    """Both variants. `servers` and `optimizers`: for each client the server part that serves it (SS: the same one)."""
    clients = new_clients(given, ("client",))
    ledger = Ledger()
    f_server = FServer(given, ledger, {"client model": ("client",)}, ("client",))
    f_server.first_download()
    for t in range(given.rounds):
        cohort = cohort_of(given, clients, t)
        for client in cohort:
            f_server.send_newest(t, client)
            if optimizers[0] is not optimizers[-1]:
                start_optimizers(given, [optimizers[client.number]])
        for k, present in interleaved(given, cohort, t):
            for client in present:
                inputs, target = given.batches[t, client.number, k]
                z = client.parts["client"](inputs)
                ledger.bill_upload(t, client.number, z, target)
                reply = serve(given, servers[client.number], optimizers[client.number], z, target)
                ledger.bill(t, client.number, "down", "cut gradients", [reply])
                step_on_cut_gradient(client, z, reply)
        f_server.aggregate(t, cohort)
        average_servers(given, servers, given.cohorts[t])
    return Found(
        f_server.newest["client"],
        state(given, "server", servers[0]),
        {},
        dict(ledger.bytes),
        controls=f_server.all_controls(clients),
    )


def serve(given: Given, server: nn.Module, optimizer: Optimizer, z: Tensor, target: Target) -> Tensor:
    """The server part takes a step; returns the cut gradient of its weights before the step."""
    z = z.detach().requires_grad_()
    backward_and_step(given.loss(server(z), target), [optimizer])
    return z.grad


def average_servers(given: Given, servers: list[nn.Module], cohort: list[int]) -> None:
    """The mean of the copies of this round's cohort is what all copies start from. One shared server is left alone."""
    if not cohort or all(server is servers[0] for server in servers):
        return
    states = [state(given, "server", servers[number]) for number in cohort]
    mean = average(states, [given.weights[number] for number in cohort])
    for server in servers:
        load(server, mean)

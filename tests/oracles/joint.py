"""SplitFed-SS with joint steps ("synchronous SplitFed"): the S-server takes one step for all clients together.

In step k all clients that have a batch for it send z_i and y_i. L_i is the mean loss of client i through x_s. The
S-server takes one step on (1/n) Σ L_i, n the number of these clients, and replies ∂L_i/∂z_i, which is not divided by n.
All of it is computed with x_s before the step. The F-server averages x_c at the end of the round, as in SplitFed-SS.

Left open by the specification, chosen here:
1. The mean over the clients is uniform, whatever their weights and the sizes of their batches. (LocFedMix-SL weights by
   data; CPSL takes the mean over all samples.) Only the F-server's average goes by weights.
2. n counts the clients that have a batch for step k. Who has fewer batches is missing in later steps.
3. Each client's batch passes the server part by itself, in ascending order of the clients: BatchNorm takes its
   statistics from one client's batch, and the running ones move once for each client.
4. Bytes are those of SplitFed-SS.
"""

from torch import Tensor, autograd
from torch.optim import Optimizer

from tests.oracles.common import (
    FServer,
    Ledger,
    backward_and_step,
    cohort_of,
    interleaved,
    new_clients,
    new_optimizer,
    new_part,
    state,
    step_on_cut_gradient,
)
from tests.oracles.given import Found, Given


def splitfed_ss_joint(given: Given) -> Found:
    return federation(given, every=1)


def federation(given: Given, every: int) -> Found:
    """Joint steps, and an average of the client parts in every `every`-th round."""
    clients = new_clients(given, ("client",))
    server = new_part(given, "server")
    optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)
    ledger = Ledger()
    f_server = FServer(given, ledger, {"client model": ("client",)}, ("client",), every)
    f_server.first_download()
    for t in range(given.rounds):
        cohort = cohort_of(given, clients, t)
        for client in cohort:
            f_server.send_newest(t, client)
        for k, present in interleaved(given, cohort, t):
            z, leaves, losses = [], [], []
            for client in present:
                inputs, target = given.batches[t, client.number, k]
                z.append(client.parts["client"](inputs))
                leaves.append(z[-1].detach().requires_grad_())
                ledger.bill_upload(t, client.number, z[-1], target)
                losses.append(given.loss(server(leaves[-1]), target))
            replies = reply_and_step(leaves, losses, sum(losses) / len(losses), optimizer)
            for client, own, reply in zip(present, z, replies, strict=True):
                ledger.bill(t, client.number, "down", "cut gradients", [reply])
                step_on_cut_gradient(client, own, reply)
        f_server.aggregate(t, cohort)
    return Found(
        f_server.newest["client"],
        state(given, "server", server),
        {},
        dict(ledger.bytes),
        clients={client.number: f_server.next_state(client, "client") for client in clients},
        controls=f_server.all_controls(clients),
    )


def reply_and_step(leaves: list[Tensor], losses: list[Tensor], total: Tensor, optimizer: Optimizer) -> list[Tensor]:
    """The S-server steps on the total; returns the gradients of each client's own loss for its own activations."""
    replies = [autograd.grad(loss, z, retain_graph=True)[0] for z, loss in zip(leaves, losses, strict=True)]
    backward_and_step(total, [optimizer])
    return replies

"""CPSL (Wu et al. 2023): clusters one after the other, the members of a cluster in parallel.

A cluster's turn: x_c comes down to all members. In step k those who have a batch for it send z_i and y_i; the S-server
puts them one behind the other in ascending order of the members, takes one step on the mean loss of the whole, and
replies to each member its slice of the gradient. At the end of the turn the members' x_c go up, their average is the
x_c of the next cluster. The order of clusters and their members are `Given.clusters`. One server part with one
optimizer for all.

Left open by the specification, chosen here:
1. A turn has as many steps as the longest of its members has batches in this round (all their local steps, then one
   average); who has fewer batches is missing in later steps.
2. The reply is, as the paper has it, the slice of the gradient of the cluster's mean loss: terms_i / Σ terms times the
   gradient of the member's own mean loss (1/m for equal batches). With `own_reply` it is divided by that factor, which
   is the reply of joint steps. For a cluster of one both are the same. The S-server's step is the same in both.
3. The mean loss is over all loss terms of the cluster: members count by the terms in their batches, not by weights.
4. The batches pass the server part as one batch: BatchNorm takes its statistics from the whole, and moves the running
   ones once a step. (Joint steps let each batch pass by itself.) Texts of unequal lengths are filled up with zeros at
   the end, in z and in the targets, and a reply is cut to the member's own length.
5. Averages go by the clients' weights, buffers too, over all members, also those without a batch.
6. Without `hands_on_optimizer` each client has an optimizer of its own, which keeps its state for the whole run. With
   it the state travels with x_c as in `sl`: members start from the same state; at the end of the turn moments and
   momentum are averaged as x_c is, and of the step counters the largest is taken.
7. Bytes are those of `sl`: for each member and turn, "client model" once down and once up, no first download of x_c;
   "optimizer state" likewise if it is handed on, not down in the run's first turn.
"""

from torch import Tensor, nn
from torch.optim import Optimizer

from tests.oracles.alignment import Samples, join
from tests.oracles.common import (
    Ledger,
    backward_and_step,
    interleaved,
    new_clients,
    new_optimizer,
    new_part,
    state,
    step_on_cut_gradient,
)
from tests.oracles.given import Found, Given
from tests.oracles.sl import Relay


def cpsl(given: Given) -> Found:
    clients = new_clients(given, ("client",))
    server = new_part(given, "server")
    optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)
    ledger = Ledger()
    relay = Relay(given, ledger)
    for t in range(given.rounds):
        assert sorted(number for cluster in given.clusters[t] for number in cluster) == given.cohorts[t]
        for cluster in given.clusters[t]:
            members = [clients[number] for number in cluster]
            for client in members:
                relay.bring(t, client)
            for k, present in interleaved(given, members, t):
                z, uploads = [], []
                for client in present:
                    inputs, target = given.batches[t, client.number, k]
                    z.append(client.parts["client"](inputs))
                    uploads.append(Samples(z[-1].detach(), target))
                    ledger.bill_upload(t, client.number, z[-1], target)
                replies = serve_cluster(given, server, optimizer, uploads)
                for client, own, reply in zip(present, z, replies, strict=True):
                    ledger.bill(t, client.number, "down", "cut gradients", [reply])
                    step_on_cut_gradient(client, own, reply)
            relay.take(t, members)
    return Found(relay.x_c, state(given, "server", server), {}, dict(ledger.bytes))


def serve_cluster(given: Given, server: nn.Module, optimizer: Optimizer, uploads: list[Samples]) -> list[Tensor]:
    """One step on all uploads together; returns each member's slice of the gradient."""
    together = join(uploads)
    z = together.z.requires_grad_()
    backward_and_step(given.loss(server(z), together.target), [optimizer])
    replies, start = [], 0
    for upload in uploads:
        reply = z.grad[start : start + len(upload)]
        start += len(upload)
        if upload.z.dim() > 2:
            reply = reply[:, : upload.z.shape[1]]  # without the filling of texts; images are of one size
        if given.own_reply:
            reply = reply * (given.terms(together.target) / given.terms(upload.target))
        replies.append(reply)
    return replies

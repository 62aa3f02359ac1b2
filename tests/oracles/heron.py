"""HERON-SFL (Kou et al. 2026): clients learn from two forward passes, the S-server by ordinary backpropagation.

θ = (x_c, x_a), d its number of trained weights. A local step: l(θ) is the mean loss through x_a, and z the client
part's output in this pass; s = [l(θ + μu) - l(θ)] / μ; θ -= η·d·s·u. Steps 0, k, 2k, ... (`upload_every`) send z and y,
on which the S-server steps as in CSE-FSL. The F-server averages x_c and x_a at the end of the round. No gradient is
computed at a client. The direction u is handed in (`Given.direction`), as is μ (`Given.smoothing`); η is `lr`.

Left open by the specification, chosen here:
1. The update is the plain one: no momentum, no Adam, no weight decay at the client, whatever `optimizer` says. That,
   with `server_lr` and `weight_decay`, is for the S-server.
2. u spans the trained weights of x_c, then those of x_a, in the order of parameters(), each flattened row by row; d is
   its length. Frozen weights and buffers are not perturbed.
3. z is that of the unperturbed pass, so made before the step.
4. Both passes are in training mode on the same batch. The unperturbed one moves BatchNorm's running statistics, once a
   step; the perturbed one uses batch statistics and leaves the running ones alone.
5. After the perturbed pass θ is restored from a copy, not by subtraction, so that no rounding stays behind.
6. Bytes are those of CSE-FSL. Seeds of directions are not sent: averages go up and down as weights.
7. FedOpt acts on the average; FedProx and SCAFFOLD do not exist without gradients, and are refused.
"""

import torch
from torch import Tensor, nn

from tests.oracles.common import (
    Client,
    FServer,
    Ledger,
    backward_and_step,
    cohort_of,
    interleaved,
    new_optimizer,
    new_part,
    running_statistics_untouched,
    state,
    trained,
)
from tests.oracles.given import Found, Given, Target

HELD = ("client", "auxiliary")


def heron_sfl(given: Given) -> Found:
    assert not given.proximal
    assert not given.scaffold
    clients = [Client(number, {part: new_part(given, part) for part in HELD}, {}) for number in range(given.clients)]
    server = new_part(given, "server")
    optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)
    ledger = Ledger()
    f_server = FServer(given, ledger, {"client model": ("client",), "auxiliary": ("auxiliary",)}, HELD)
    f_server.first_download()
    for t in range(given.rounds):
        cohort = cohort_of(given, clients, t)
        for client in cohort:
            f_server.send_newest(t, client)
        for k, present in interleaved(given, cohort, t):
            for client in present:
                inputs, target = given.batches[t, client.number, k]
                z = zeroth_order_step(given, client, inputs, target, given.direction(t, client.number, k))
                if k % given.upload_every == 0:
                    ledger.bill_upload(t, client.number, z, target)
                    backward_and_step(given.loss(server(z), target), [optimizer])
        f_server.aggregate(t, cohort)
    auxiliaries = dict.fromkeys(range(given.clients), f_server.newest["auxiliary"])
    return Found(f_server.newest["client"], state(given, "server", server), auxiliaries, dict(ledger.bytes))


@torch.no_grad()
def zeroth_order_step(given: Given, client: Client, inputs: Tensor, target: Target, u: Tensor) -> Tensor:
    """One step of θ; returns z of the unperturbed pass."""
    x_c, x_a = client.parts["client"], client.parts["auxiliary"]
    theta = [*trained(x_c), *trained(x_a)]
    pieces = cut_up(u, theta)
    z = x_c(inputs)
    loss = given.loss(x_a(z), target)
    saved = [weight.clone() for weight in theta]
    for weight, piece in zip(theta, pieces, strict=True):
        weight += given.smoothing * piece
    with running_statistics_untouched(x_c), running_statistics_untouched(x_a):
        perturbed = given.loss(x_a(x_c(inputs)), target)
    s = (perturbed - loss) / given.smoothing
    for weight, old, piece in zip(theta, saved, pieces, strict=True):
        weight.copy_(old - given.lr * len(u) * s * piece)
    return z


def cut_up(u: Tensor, theta: list[nn.Parameter]) -> list[Tensor]:
    """The flat direction in the shapes of the weights."""
    pieces = u.split([weight.numel() for weight in theta])
    return [piece.view(weight.shape) for piece, weight in zip(pieces, theta, strict=True)]

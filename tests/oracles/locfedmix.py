"""LocFedMix-SL (Oh et al. 2022): joint steps, mixed activations at the S-server, decoders at the clients.

In step k all clients that have a batch for it send s_i and y_i. S-server: L_i = loss(x_s(s_i), y_i). For each partner
(j, λ) of i, s~ = λ s_i + (1 - λ) s_j and L~_ij = λ loss(x_s(s~), y_i) + (1 - λ) loss(x_s(s~), y_j), which for cross
entropy is the loss of mixed labels. One step of x_s on Σ_i δ_i (L_i + mean over i's partners of L~_ij). Reply: g_i =
∂L_i/∂s_i, not multiplied by δ_i, with x_s before the step. Client: R_i = mean of (x - h_i(s_i))²; the decoder h_i steps
on R_i, x_c on g_i + ∂R_i/∂s_i, both with h_i before its step. The F-server averages x_c and h in each T_c-th round
(`average_every`).

Left open by the specification, chosen here:
1. δ_i is the client's weight over the sum of the weights of the clients that have a batch in this step.
2. λ is one number for a pair (i, j) in a step, the same for all samples of the batch.
3. Batches of unequal sizes: s~ is made of the first samples of both, as many as the smaller batch has, sample by
   sample.
4. A client without partners in a step has no mixed loss in it; its L_i counts as ever.
5. Mixed passes use BatchNorm's batch statistics, and leave the running ones alone, which are for unmixed activations.
   The unmixed passes move them, one client after the other in ascending order, as in joint steps.
6. R_i is the mean over the batch and over all elements of an input (torch's mse_loss), so that it stays on the scale of
   a mean cross entropy whatever the size of an image. The squared norm of the paper is larger by the number of
   elements. It has no weight: x_c's gradient is the plain sum. Inputs must be floating tensors: there is no decoder for
   texts.
7. The decoder's optimizer is of the kind of the clients', lasts for the whole run, has `decoder_lr`, and the weight
   decay of an auxiliary. Each client has a decoder of its own; all start from the same weights.
8. x_c has one step a batch, on the sum of both gradients.
9. Average rounds are t with (t + 1) % T_c = 0, over the cohort of that round, by the clients' weights. In other rounds
   clients keep what they have, and no model travels. A client that was away in an average round (also one with an empty
   cohort) starts its next round from the newest average and drops what it had.
10. The decoder is averaged and travels as x_c does, as a kind of its own, "decoder". It is part of the first download.
11. Found.client is the newest average (the initial x_c before the first one), Found.clients what each would start with.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.common import (
    Client,
    FServer,
    Ledger,
    cohort_of,
    interleaved,
    new_clients,
    new_optimizer,
    new_part,
    running_statistics_untouched,
    state,
    step_on_cut_gradient,
)
from tests.oracles.given import Found, Given, Mixing, Target
from tests.oracles.joint import reply_and_step


def locfedmix_sl(given: Given) -> Found:
    has_decoder = "decoder" in given.parts
    kinds = {"client model": ("client",)} | ({"decoder": ("decoder",)} if has_decoder else {})
    held = [part for parts in kinds.values() for part in parts]
    clients = new_clients(given, held)
    server = new_part(given, "server")
    optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)
    ledger = Ledger()
    f_server = FServer(given, ledger, kinds, held, given.average_every)
    f_server.first_download()
    for t in range(given.rounds):
        cohort = cohort_of(given, clients, t)
        for client in cohort:
            f_server.send_newest(t, client)
        for k, present in interleaved(given, cohort, t):
            batches = {client.number: given.batches[t, client.number, k] for client in present}
            s = {client.number: client.parts["client"](batches[client.number][0]) for client in present}
            targets = {number: target for number, (_, target) in batches.items()}
            leaves = {number: own.detach().requires_grad_() for number, own in s.items()}
            losses = {number: given.loss(server(leaves[number]), targets[number]) for number in s}
            mixed = mixed_losses(given, server, leaves, targets, given.mixing.get((t, k), {}))
            total = weighted_sum(given, {number: losses[number] + mixed.get(number, 0) for number in s})
            replies = reply_and_step(list(leaves.values()), list(losses.values()), total, optimizer)
            for client, reply in zip(present, replies, strict=True):
                ledger.bill_upload(t, client.number, s[client.number], targets[client.number])
                ledger.bill(t, client.number, "down", "cut gradients", [reply])
                if has_decoder:
                    reply = reply + learn_to_decode(client, s[client.number], batches[client.number][0])
                step_on_cut_gradient(client, s[client.number], reply)
        f_server.aggregate(t, cohort)
    return Found(
        f_server.newest["client"],
        state(given, "server", server),
        {},
        dict(ledger.bytes),
        clients={client.number: f_server.next_state(client, "client") for client in clients},
        decoders={client.number: f_server.next_state(client, "decoder") for client in clients} if has_decoder else {},
        controls=f_server.all_controls(clients),
    )


def weighted_sum(given: Given, losses: dict[int, Tensor]) -> Tensor:
    """Σ δ_i loss_i over the clients of this step."""
    total = sum(given.weights[number] for number in losses)
    return sum(given.weights[number] / total * loss for number, loss in losses.items())


def mixed_losses(
    given: Given, server: nn.Module, s: dict[int, Tensor], targets: dict[int, Target], mixing: Mixing
) -> dict[int, Tensor]:
    """By client that has partners: the mean of its mixed losses. They reach the server part alone."""
    means: dict[int, Tensor] = {}
    for i, partners in mixing.items():
        losses = [mixed_loss(given, server, share, (s[i], targets[i]), (s[j], targets[j])) for j, share in partners]
        if losses:
            means[i] = sum(losses) / len(losses)
    return means


def mixed_loss(
    given: Given, server: nn.Module, share: float, one: tuple[Tensor, Target], other: tuple[Tensor, Target]
) -> Tensor:
    """L~ of two uploads; `share` is λ, that of the first."""
    size = min(len(one[0]), len(other[0]))
    s = share * one[0][:size].detach() + (1 - share) * other[0][:size].detach()
    y_i, y_j = ({name: tensor[:size] for name, tensor in target.items()} for _, target in (one, other))
    with running_statistics_untouched(server):
        output = server(s)
    return share * given.loss(output, y_i) + (1 - share) * given.loss(output, y_j)


def learn_to_decode(client: Client, s: Tensor, inputs: Tensor) -> Tensor:
    """One step of the decoder on R; returns ∂R/∂s."""
    s = s.detach().requires_grad_()
    client.optimizers["decoder"].zero_grad()
    F.mse_loss(client.parts["decoder"](s), inputs).backward()
    client.optimizers["decoder"].step()
    return s.grad

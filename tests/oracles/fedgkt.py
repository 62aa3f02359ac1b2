"""FedGKT (He et al. 2020): small models at the clients and one large one at the server teach each other by logits.

A round: each client of the cohort steps its own x_c and head ("auxiliary") through its batches of this round, E_c
epochs, on CE + client_kl * KL(from the server's newest logits), the latter if it has any. Then, in evaluation mode, it
sends features (the output of x_c), logits and labels of its whole training set. The server steps through its batches of
this round, E_s epochs over these features, on server_kl * KL(from the client's logits) + server_ce * CE. Then it sends
its logits of each example back. Examples are known by (client, id), never by their place in a batch. Nothing is
averaged, ever.

KL = T² · mean over the batch of Σ_c p_c (log p_c - log q_c), p = softmax(teacher's logits / T), q = softmax(student's /
T). The teacher's logits are data: no gradient. The factor T² is that of the authors' public code (and of Hinton et al.
2015); the paper's formula, from memory, is the bare divergence, which is `temperature_squared=False`. The public code
adds 1e-7 to p, which is left out here. α of the public code is both client_kl and server_ce.

Bytes, for a client with N examples in a round: up "activations" N·|z|, "logits" N·C·itemsize, "labels" the targets;
down "logits" N·C·itemsize. The last round's logits are sent and billed too.

Left open by the specification, chosen here:
1. All clients start from the same weights, which are a "first download" (x_c and head, and what is frozen in them): at
   round -1 for the cohort of round 0, in the first round of all others. After that no weight travels.
2. KL at a client begins in its second round: it then has the server's logits from its own last round, however long ago.
3. The server's logits are made in evaluation mode after its last step of the round, for each example of the round's
   cohort. (The public code takes them from the training passes of its last epoch.)
4. The server learns from the features of this round's cohort only. It forgets those of earlier rounds.
5. Each batch of the server may have examples of several clients: the batches are data.
6. Losses of a batch: CE is its mean loss, KL the mean over its examples. Outputs are logits [B, C]; there are no texts.
7. Optimizers of clients (one for x_c, one for the head, with the weight decay of an auxiliary) and of the server keep
   their state for the whole run. The server's learning rate is `server_lr`.
8. Targets travel in their own dtype, with every upload again.
9. Weight 0 of a KL means that it is not computed. With both 0 clients train alone, and the server on features of
   clients that it does not influence.
10. Found.client is empty, for there is no merged model. Found.clients and Found.auxiliaries have each client's own,
    those of clients that never came being the initial ones. Found.logits has the newest logits that were sent, by
    (client, example).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.common import (
    Client,
    Ledger,
    backward_and_step,
    cohort_of,
    frozen,
    new_clients,
    new_optimizer,
    new_part,
    start_optimizers,
    state,
)
from tests.oracles.given import Distillation, Found, Given, Target

Example = tuple[int, int]
"""(client, id)"""
Logits = dict[Example, Tensor]
HELD = ("client", "auxiliary")


def fedgkt(given: Given) -> Found:
    options = given.distillation
    clients = new_clients(given, HELD)
    server = new_part(given, "server")
    optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)
    ledger = Ledger()
    server_logits: Logits = {}
    for t in range(given.rounds):
        features: dict[Example, Tensor] = {}
        client_logits: Logits = {}
        for client in cohort_of(given, clients, t):
            bill_first_download(given, ledger, t, client)
            start_optimizers(given, client.optimizers.values())
            for ids in options.client_batches[t, client.number]:
                client_step(given, client, [(client.number, one) for one in ids], server_logits)
            for example in training_set(options, client):
                features[example], client_logits[example] = extract(options, client, example)
                ledger.bill_upload(t, client.number, features[example], options.examples[example][1])
                ledger.bill(t, client.number, "up", "logits", [client_logits[example]])
        for batch in options.server_batches[t]:
            output = server(torch.cat([features[example] for example in batch]))
            loss = options.server_ce * given.loss(output, target_of(options, batch))
            if options.server_kl:
                loss = loss + options.server_kl * divergence(options, output, client_logits, batch)
            backward_and_step(loss, [optimizer])
        for example, own in features.items():
            server_logits[example] = evaluate(server, own)
            ledger.bill(t, example[0], "down", "logits", [server_logits[example]])
    return Found(
        {},
        state(given, "server", server),
        {client.number: state(given, "auxiliary", client.parts["auxiliary"]) for client in clients},
        dict(ledger.bytes),
        clients={client.number: state(given, "client", client.parts["client"]) for client in clients},
        logits=server_logits,
    )


def bill_first_download(given: Given, ledger: Ledger, t: int, client: Client) -> None:
    if client.last_round is None:
        tensors = [tensor for part in HELD for tensor in given.initial[part].values()]
        when = t if t > 0 else -1
        ledger.bill(when, client.number, "down", "first download", [*tensors, *frozen(given, HELD)])
    client.last_round = t


def training_set(options: Distillation, client: Client) -> list[Example]:
    return sorted(example for example in options.examples if example[0] == client.number)


def target_of(options: Distillation, batch: list[Example]) -> Target:
    targets = [options.examples[example][1] for example in batch]
    return {name: torch.cat([target[name] for target in targets]) for name in targets[0]}


def client_step(given: Given, client: Client, batch: list[Example], server_logits: Logits) -> None:
    """Client part and head step on CE, and on KL if the server has sent logits."""
    options = given.distillation
    inputs = torch.cat([options.examples[example][0] for example in batch])
    output = client.parts["auxiliary"](client.parts["client"](inputs))
    loss = given.loss(output, target_of(options, batch))
    if options.client_kl and batch[0] in server_logits:
        loss = loss + options.client_kl * divergence(options, output, server_logits, batch)
    backward_and_step(loss, client.optimizers.values())


def divergence(options: Distillation, student: Tensor, teacher: Logits, batch: list[Example]) -> Tensor:
    """KL of a batch, from the teacher's distribution to the student's."""
    T = options.temperature
    log_p = F.log_softmax(torch.cat([teacher[example] for example in batch]) / T, dim=1)
    log_q = F.log_softmax(student / T, dim=1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()
    return T**2 * kl if options.temperature_squared else kl


def extract(options: Distillation, client: Client, example: Example) -> tuple[Tensor, Tensor]:
    """Features and logits of one example."""
    features = evaluate(client.parts["client"], options.examples[example][0])
    return features, evaluate(client.parts["auxiliary"], features)


@torch.no_grad()
def evaluate(module: nn.Module, inputs: Tensor) -> Tensor:
    """The output in evaluation mode."""
    module.eval()
    output = module(inputs)
    module.train()
    return output

"""AdaptSFL (Lin et al., arXiv 2403.13101): joint steps, an average in every I-th round, a cut for each client.

With one cut for all (no `Given.cuts`) it is joint.py with an average only in rounds t with (t + 1) % I = 0
(`Given.average_every`). Else the model is a row of blocks, and client i holds the blocks 0 to cut_i - 1. The S-server
holds one copy of each block from the shallowest cut (of all clients, present or not) on. A block between the shallowest
and the deepest cut so has copies at those clients that hold it, and one at the S-server, for those that do not.

A step k: each client i that has a batch for it sends z_i = output of its last block, and y_i. The S-server passes z_i
through its blocks from cut_i on; L_i is the mean loss. Block b of the S-server steps on the mean of L_i over the
clients of this step that it serves, those with cut_i <= b: (1/n_b) Σ L_i, n_b their number. A block that serves nobody
in a step does not step (no weight decay, no momentum, no count). Reply: ∂L_i/∂z_i, not divided. The client steps its
own blocks on it. All gradients are those of the S-server's weights before the step.

An average round: for each block b before the deepest cut, the new value is the mean over
- the copies of the clients of this round's cohort that hold it, each with its weight,
- the S-server's copy, if it has one, with the sum of the weights of the clients of this round's cohort that it serves.
It is the newest value at the F-server, goes to the cohort's clients that hold the block, and replaces the S-server's
copy. If nobody of the cohort holds the block, that is the S-server's own value. If the S-server's copy serves nobody of
the cohort, it has no weight, and is replaced. Blocks from the deepest cut on are the S-server's alone and never
averaged.

With equal weights, SGD without momentum, equal learning rates, one step a round and I = 1 this is large-batch SGD, for
any cuts. That is why a block steps on the mean over those it serves, and not over all clients.

Left open by the specification, chosen here:
1. The S-server has one copy of a block between the cuts, for all clients with a shallower cut. (The paper, from memory,
   has one for each such client, averaged with the others; after one step of SGD the average is the same.)
2. Everything is averaged by weights, but the S-server's loss is a uniform mean over clients, as in joint steps.
3. Clients and weights in an average are those of the average round's cohort, though the S-server's copy may have served
   others since the last average.
4. Buffers are averaged as weights, and of counters the largest is taken, the S-server's copy included if it has weight.
   The S-server's BatchNorm sees the clients' batches apart, in ascending order.
5. Optimizer states are neither averaged nor reset, at clients and at the S-server. A client has one optimizer for all
   its blocks (`lr`), the S-server one for all of its own (`server_lr`), both with `weight_decay`.
6. A client that was away in an average round (also one with an empty cohort) starts its next round from the newest
   values of its blocks. One that was not keeps what it has. Newcomers get the newest values.
7. Bytes: "client model" is the client's own blocks, up and down in average rounds, down for those who return or come
   first after round 0; "first download" at round -1 its own blocks. What passes between F-server and S-server is not
   billed. "activations", "labels" and "cut gradients" as in SplitFed, with the size that z has at the client's cut.
8. Found.client has the newest values of the blocks before the deepest cut at the F-server (the initial ones before the
   first average), Found.server the S-server's copies, Found.clients by client the blocks it would start the next round
   with, all under the names of the whole row, such as "2.weight". Nothing in a row of blocks is frozen.
9. FedProx, FedOpt and SCAFFOLD act with one cut for all only.
"""

from torch import Tensor, autograd, nn
from torch.optim import Optimizer

from tests.oracles.common import (
    Client,
    Ledger,
    average,
    averages_within,
    cohort_of,
    interleaved,
    load,
    new_optimizer,
    new_part,
    start_optimizers,
    step_on_cut_gradient,
)
from tests.oracles.given import Found, Given, Target, Tensors
from tests.oracles.joint import federation


def adaptsfl(given: Given) -> Found:
    return WithCuts(given).run() if given.cuts else federation(given, given.average_every)


def block_of(name: str) -> int:
    return int(name.split(".")[0])


def blocks_of(tensors: Tensors, first: int, end: int) -> Tensors:
    """Copies of the tensors of these blocks."""
    return {name: tensor.clone() for name, tensor in tensors.items() if first <= block_of(name) < end}


class WithCuts:
    """A federation in which each client has a cut of its own."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.cuts = given.cuts
        self.shallowest, self.deepest = min(self.cuts), max(self.cuts)
        self.ledger = Ledger()
        self.clients = [self.new_client(number) for number in range(given.clients)]
        self.server = new_part(given, "blocks")  # blocks before the shallowest cut are never used
        self.optimizer = new_optimizer(given, self.server, given.server_lr, given.weight_decay)
        self.newest = blocks_of(dict(given.initial["blocks"]), 0, self.deepest)

    def new_client(self, number: int) -> Client:
        own = new_part(self.given, "blocks")[: self.cuts[number]]
        optimizer = new_optimizer(self.given, own, self.given.lr, self.given.weight_decay)
        return Client(number, {"client": own}, {"client": optimizer})

    def run(self) -> Found:
        given = self.given
        for number in given.cohorts[0]:
            self.ledger.bill(-1, number, "down", "first download", self.newest_of(number).values())
        for t in range(given.rounds):
            cohort = cohort_of(given, self.clients, t)
            for client in cohort:
                self.start(t, client)
            for k, present in interleaved(given, cohort, t):
                self.step(t, k, present)
            if cohort and averages_within(given.average_every, t, t + 1):
                self.average(t, cohort)
        return Found(
            self.newest,
            blocks_of(self.server.state_dict(), self.shallowest, len(self.server)),
            {},
            dict(self.ledger.bytes),
            clients={client.number: self.next_blocks(given.rounds, client) for client in self.clients},
        )

    def newest_of(self, number: int) -> Tensors:
        return blocks_of(self.newest, 0, self.cuts[number])

    def next_blocks(self, t: int, client: Client) -> Tensors:
        """What a client starts round t with."""
        every = self.given.average_every
        if client.last_round is None or averages_within(every, client.last_round, t):
            return self.newest_of(client.number)
        return blocks_of(client.parts["client"].state_dict(), 0, self.cuts[client.number])

    def start(self, t: int, client: Client) -> None:
        blocks = self.next_blocks(t, client)
        load(client.parts["client"], blocks)
        every = self.given.average_every
        if t > 0 and (client.last_round is None or averages_within(every, client.last_round + 1, t)):
            self.ledger.bill(t, client.number, "down", "client model", blocks.values())
        client.last_round = t
        start_optimizers(self.given, client.optimizers.values())

    def step(self, t: int, k: int, present: list[Client]) -> None:
        z = {}
        targets = {}
        for client in present:
            inputs, targets[client.number] = self.given.batches[t, client.number, k]
            z[client.number] = client.parts["client"](inputs)
            self.ledger.bill_upload(t, client.number, z[client.number], targets[client.number])
        replies = serve_blocks(self.given, self.server, self.optimizer, z, targets)
        for client in present:
            self.ledger.bill(t, client.number, "down", "cut gradients", [replies[client.number]])
            step_on_cut_gradient(client, z[client.number], replies[client.number])

    def average(self, t: int, cohort: list[Client]) -> None:
        for b in range(self.deepest):
            self.newest |= self.average_block(b, cohort)
        load(self.server, blocks_of(self.newest, self.shallowest, self.deepest))
        for client in cohort:
            for direction in ("up", "down"):
                self.ledger.bill(t, client.number, direction, "client model", self.newest_of(client.number).values())

    def average_block(self, b: int, cohort: list[Client]) -> Tensors:
        weights = self.given.weights
        holders = [client for client in cohort if self.cuts[client.number] > b]
        copies = [blocks_of(client.parts["client"].state_dict(), b, b + 1) for client in holders]
        counts = [weights[client.number] for client in holders]
        served = [weights[client.number] for client in cohort if self.cuts[client.number] <= b]
        if served:
            copies.append(blocks_of(self.server.state_dict(), b, b + 1))
            counts.append(sum(served))
        return average(copies, counts)


def serve_blocks(
    given: Given, server: nn.Sequential, optimizer: Optimizer, z: dict[int, Tensor], targets: dict[int, Target]
) -> dict[int, Tensor]:
    """One step of the S-server's blocks; returns the replies. z, targets and replies by client."""
    leaves = {number: own.detach().requires_grad_() for number, own in z.items()}
    losses = {
        number: given.loss(server[given.cuts[number] :](leaf), targets[number]) for number, leaf in leaves.items()
    }
    replies = {number: autograd.grad(losses[number], leaf, retain_graph=True)[0] for number, leaf in leaves.items()}
    optimizer.zero_grad()
    for b, block in enumerate(server):
        served = [loss for number, loss in losses.items() if given.cuts[number] <= b]
        weights = list(block.parameters())
        if served and weights:
            gradients = autograd.grad(sum(served) / len(served), weights, retain_graph=True)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
    optimizer.step()
    return replies

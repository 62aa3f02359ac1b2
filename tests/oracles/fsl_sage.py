"""FSL-SAGE, to be read beside the paper's Algorithms 1 to 3. Lazy FSL-SAGE is the same with `align_until` (T')."""

import copy

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from tests.oracles.alignment import Samples, align, cut_batches, keep_newest, keep_newest_of_all, keep_newest_tokens
from tests.oracles.alignment import rows as alignment_rows
from tests.oracles.common import (
    Client,
    FServer,
    Ledger,
    average_part,
    backward_and_step,
    cohort_of,
    cut_gradient,
    interleaved,
    load,
    new_clients,
    new_optimizer,
    new_part,
    running_statistics_untouched,
    state,
    step_on_cut_gradient,
    trained,
)
from tests.oracles.cse_fsl import step_on_own_loss
from tests.oracles.given import Found, Given, Target, Tensors
from tests.oracles.ridge import Regression, estimated_gradient, mean_square

POOLED = -1
"""In the place of a client's number: the one auxiliary for all."""


def fsl_sage(given: Given) -> Found:
    return Federation(given).run()


class Federation:
    """The three roles, and the auxiliaries on their way to clients that are away."""

    def __init__(self, given: Given) -> None:
        held = ("client", "auxiliary")
        self.given = given
        self.ledger = Ledger()
        self.clients = new_clients(given, held)
        self.f_server = FServer(given, self.ledger, {"client model": ("client",)}, held)
        self.s_server = SServer(given)
        self.renewed: set[int] = set()
        """The clients that will begin their next round with a new auxiliary."""
        self.waiting: dict[int, Tensors] = {}
        """By client: the newest aligned auxiliary that has not reached it."""

    def run(self) -> Found:
        given = self.given
        self.f_server.first_download()
        for t in range(given.rounds):
            cohort = cohort_of(given, self.clients, t)
            for client in cohort:
                self.start(t, client)
            self.local_steps(t, cohort)
            self.f_server.aggregate(t, cohort)
            if given.warm_start and t == 0:
                self.average_auxiliaries(t, cohort)
            if given.align_when == "drift":
                self.align(t, self.s_server.drifted(t))
            elif aligns(given, t) and given.align_at == "end":
                self.align(t)
        server = state(given, "server", self.s_server.module)
        auxiliaries = {client.number: self.next_auxiliary(client) for client in self.clients}
        controls = self.f_server.all_controls(self.clients)
        return Found(self.f_server.newest["client"], server, auxiliaries, dict(self.ledger.bytes), controls=controls)

    def start(self, t: int, client: Client) -> None:
        """Algorithm 1, lines 2 and 3: the newest averaged client part, and the newest auxiliary."""
        comes_first = client.last_round is None
        auxiliary = self.next_auxiliary(client)
        if t > 0 and (comes_first or client.number in self.waiting):
            self.ledger.bill(t, client.number, "down", "auxiliary", auxiliary.values())
        load(client.parts["auxiliary"], auxiliary)
        self.waiting.pop(client.number, None)
        self.f_server.send_newest(t, client)
        if client.number in self.renewed or client.held is None:
            self.take_hold(client)

    def take_hold(self, client: Client) -> None:
        """With a hold: what the client has now is where its auxiliary is good."""
        self.renewed.discard(client.number)
        client.held = copy.deepcopy(client.parts["client"])

    def next_auxiliary(self, client: Client) -> Tensors:
        """What the client will use in its next round: the one that waits for it, or its own, or that of a newcomer."""
        if client.number in self.waiting:
            return self.waiting[client.number]
        if client.last_round is None:
            return self.s_server.unaligned
        return state(self.given, "auxiliary", client.parts["auxiliary"])

    def local_steps(self, t: int, cohort: list[Client]) -> None:
        """Algorithm 1, the loop over k, for all clients side by side, and Algorithm 3, the loop over k."""
        given = self.given
        trains_auxiliary = given.local_auxiliary or (given.warm_start and t == 0)
        for k, present in interleaved(given, cohort, t):
            z: dict[int, Tensor] = {}
            for client in present:
                inputs, target = given.batches[t, client.number, k]
                z[client.number] = client.parts["client"](inputs)
                if k % given.upload_every == 0:
                    self.ledger.bill_upload(t, client.number, z[client.number], target)
                    self.s_server.learn(client.number, z[client.number].detach(), target)
            if k == 0 and aligns(given, t) and given.align_at == "start":
                self.align(t)
            for client in present:
                _, target = given.batches[t, client.number, k]
                if trains_auxiliary:
                    step_on_own_loss(given, client, z[client.number], target)
                else:
                    inputs, _ = given.batches[t, client.number, k]
                    estimate = self.estimate(client, z[client.number], target)
                    if given.hold:
                        estimate = estimate + pull(given, client, inputs, z[client.number], target)
                    step_on_cut_gradient(client, z[client.number], estimate)

    def estimate(self, client: Client, z: Tensor, target: Target) -> Tensor:
        """z_b by the client's auxiliary."""
        given, auxiliary = self.given, client.parts["auxiliary"]
        if given.ridge is not None:
            return estimated_gradient(given, auxiliary, z, target)
        gradient = cut_gradient(given, auxiliary, z, target)
        return gradient * auxiliary.fitted_scale if given.alignment.loss == "cosine" else gradient

    def align(self, t: int, chosen: list[int] | None = None) -> None:
        """Algorithm 3, from line 9: the auxiliaries reach the round's cohort, and wait for all others."""
        for number, tensors in self.s_server.align(t, chosen).items():
            self.renewed.add(number)
            if number in self.given.cohorts[t]:
                load(self.clients[number].parts["auxiliary"], tensors)
                self.ledger.bill(t, number, "down", "auxiliary", tensors.values())
                if self.given.align_at == "start":
                    self.take_hold(self.clients[number])
            else:
                self.waiting[number] = tensors

    def average_auxiliaries(self, t: int, cohort: list[Client]) -> None:
        """The end of a warm start: the auxiliaries that the clients have trained are averaged as their client parts."""
        mean = average_part(self.given, "auxiliary", cohort)
        self.s_server.unaligned = mean
        for client in cohort:
            load(client.parts["auxiliary"], mean)
            self.ledger.bill(t, client.number, "up", "auxiliary", mean.values())
            self.ledger.bill(t, client.number, "down", "auxiliary", mean.values())


def pull(given: Given, client: Client, inputs: Tensor, z: Tensor, target: Target) -> Tensor:
    """hold (z - z_0) / mean square of z_0, over the loss terms; the mean is over a token, or over an image."""
    assert client.held is not None
    with torch.no_grad(), running_statistics_untouched(client.held):
        z_0 = client.held(inputs)
    found = torch.zeros_like(z_0)
    for place in alignment_rows(given, z_0):
        found[place] = given.hold * (z.detach()[place] - z_0[place]) / mean_square(z_0[place])
    return found / given.terms(target)


def aligns(given: Given, t: int) -> bool:
    due = t in given.align_rounds if given.align_rounds else t % given.align_every == 0
    return due and t <= given.align_until


class SServer:
    """Algorithm 3."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.module = new_part(given, "server")
        self.optimizer = new_optimizer(given, self.module, given.server_lr, given.weight_decay)
        self.uploads: dict[int, list[Samples]] = {}
        """By client."""
        self.arrived: list[tuple[int, Samples]] = []
        """The same in the order in which they came, where tokens are counted."""
        self.regressions: dict[int, Regression] = {}
        """By client, or POOLED: what a ridge auxiliary is fitted to."""
        self.unaligned: Tensors = dict(given.initial["auxiliary"])
        """The auxiliary of those that were never aligned: the initial one, or the average of a warm start."""
        self.auxiliaries: dict[int, nn.Module] = {}
        """By client, or POOLED: as it was last aligned."""
        self.aligners: dict[int, Optimizer] = {}
        self.new: set[int] = set()
        """The clients whose newest upload no alignment has seen."""
        self.aligned_in: dict[int, int] = {}
        """By client, or POOLED: the round of the last alignment."""

    def learn(self, client: int, z: Tensor, target: Target) -> None:
        """One step of the server part on an upload, which is stored."""
        given, options = self.given, self.given.alignment
        z = z.requires_grad_()
        backward_and_step(given.loss(self.module(z), target), [self.optimizer])
        z, gradient = z.detach(), z.grad
        if given.ridge is not None:
            owner = POOLED if options.scope == "pooled" else client
            regression = self.regressions.setdefault(owner, Regression())
            regression.add(given, given.parts["auxiliary"](), z, target, gradient)
        if options.tokens is not None or options.total is not None:
            self.arrived = [*self.arrived, (client, Samples(z, target))]
            if options.tokens is not None:
                self.arrived = keep_newest_tokens(self.arrived, options.tokens)
            else:
                self.arrived = keep_newest_of_all(self.arrived, options.samples, options.total)
                self.new.add(client)
            self.uploads = {}
            for number, upload in self.arrived:
                self.uploads.setdefault(number, []).append(upload)
            self.new &= self.uploads.keys()
            return
        uploads = [*self.uploads.get(client, []), Samples(z, target)]
        self.uploads[client] = keep_newest(uploads, options.samples)
        self.new.add(client)

    def drifted(self, t: int) -> list[int]:
        """The clients to align: those whose estimates have become bad, or all if the common one's have."""
        cosines = {number: self._cosine(number) for number in sorted(self.new)}
        if self.given.alignment.scope == "pooled":
            is_bad = bool(cosines) and sum(cosines.values()) / len(cosines) < self.given.align_below
            return sorted(self.uploads) if is_bad and self._may_align(t, POOLED) else []
        return [n for n, cosine in cosines.items() if cosine < self.given.align_below and self._may_align(t, n)]

    def _may_align(self, t: int, owner: int) -> bool:
        return t <= self.given.align_until and t - self.aligned_in.get(owner, -(2**31)) >= self.given.align_every

    def _cosine(self, client: int) -> float:
        owner = POOLED if self.given.alignment.scope == "pooled" else client
        auxiliary = new_part(self.given, "auxiliary")
        aligned = self.auxiliaries.get(owner)
        load(auxiliary, self.unaligned if aligned is None else state(self.given, "auxiliary", aligned))
        newest = self.uploads[client][-1][-24:]
        z_b, estimate = (
            cut_gradient(self.given, module, newest.z, newest.target).flatten() for module in (self.module, auxiliary)
        )
        return float((z_b @ estimate) / (z_b.norm() * estimate.norm()))

    def align(self, t: int, chosen: list[int] | None = None) -> dict[int, Tensors]:
        """By client: its new auxiliary. One for each client with data, or one for all clients of the federation."""
        with_data = sorted(number for number, uploads in self.uploads.items() if uploads)
        if chosen is not None:
            with_data = chosen
        self.new -= set(with_data)
        if self.given.alignment.scope == "client":
            aligned = {number: self._align_one(t, number, self.uploads[number]) for number in with_data}
            return {number: tensors for number, tensors in aligned.items() if tensors is not None}
        together = [upload for number in with_data for upload in self.uploads[number]]
        tensors = self._align_one(t, POOLED, together) if together else None
        return {} if tensors is None else dict.fromkeys(range(self.given.clients), tensors)

    def _align_one(self, t: int, owner: int, uploads: list[Samples]) -> Tensors | None:
        """Aligns the auxiliary of `owner`; None if the server's gradients are zero or not finite."""
        options = self.given.alignment
        if self.given.ridge is not None:
            return {"weight": self.regressions[owner].solve(self.given.ridge.strength)}
        if owner not in self.auxiliaries:
            self.auxiliaries[owner] = new_part(self.given, "auxiliary")
            load(self.auxiliaries[owner], self.unaligned)
        auxiliary = self.auxiliaries[owner]
        if options.start == "server":
            load(auxiliary, self._server_tensors_for(auxiliary))
        if owner not in self.aligners or not options.keeps_optimizer:
            kind = Adam if options.optimizer == "adam" else SGD
            self.aligners[owner] = kind(trained(auxiliary), lr=options.lr, foreach=False, fused=False)
        batches = cut_batches(uploads, options.batch_size)
        order = self.given.alignment_orders[t, owner]
        if not align(self.given, self.module, auxiliary, self.aligners[owner], batches, order):
            return None
        self.aligned_in[owner] = t
        return state(self.given, "auxiliary", auxiliary)

    def _server_tensors_for(self, auxiliary: nn.Module) -> Tensors:
        """The server part's weights and buffers that have the name and the shape of one of the auxiliary's."""
        own = state(self.given, "auxiliary", auxiliary)
        server = self.module.state_dict()
        return {name: server[name] for name in own if name in server and server[name].shape == own[name].shape}

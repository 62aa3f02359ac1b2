"""Split learning, one client after the other, in centralised mode: x_c comes from the F-server and returns to it.

In each round the clients of the cohort take their turns in ascending order. A visit: x_c comes down, the client takes
its local steps as in SplitFed-SS (z and y up, the cut gradient down with each batch, one server part with one optimizer
for all), x_c goes up. Nothing is averaged. BatchNorm statistics are in x_c and travel with it. With `alternate` the two
loops are swapped: a visit is one batch, step k of every client before step k + 1 of any.

Bytes: "activations", "labels" and "cut gradients" as in SplitFed; "client model" (weights and buffers) once down and
once up for each visit; with `hands_on_optimizer` "optimizer state" once up and once down for each visit, but not down
in the very first visit of the run, when there is no state yet. That state is, for each trained weight, what has the
weight's shape: exp_avg and exp_avg_sq (Adam, AdamW: twice the trained weights), momentum_buffer (SGD with momentum:
once), nothing (SGD without momentum), in the weight's own dtype. The step counter travels with it and is not billed.

Left open by the specification, chosen here:
1. There is no first download of x_c: the first visit brings the initial x_c and bills it as "client model" in round 0.
   So a visit has one transfer down and one up, always. Frozen weights are a "first download", at round -1 to the cohort
   of round 0, in the round of their first visit to all others (as in SplitFed).
2. Without `hands_on_optimizer` each client has an optimizer of its own, which keeps its state for the whole run and
   never travels (as in SplitFed).
3. With it, a client's own state is replaced by the one that comes, step counter included. The learning rate is not
   state.
4. A visit without batches does not happen: with `alternate` a client whose batches are used up is left out. Without
   `alternate`, a client of the cohort that has no batch at all is visited nevertheless.
5. The S-server's state never travels. The transfer at the end of the run's last visit is billed as any other.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.oracles.common import (
    Client,
    Ledger,
    average_part,
    cohort_of,
    frozen,
    interleaved,
    load,
    new_clients,
    new_optimizer,
    new_part,
    start_optimizers,
    state,
    step_on_cut_gradient,
)
from tests.oracles.given import Found, Given
from tests.oracles.splitfed import serve

OptimizerState = dict[int, dict[str, Any]]
"""By trained weight, in order: what its optimizer remembers of it, by name."""


def sl(given: Given) -> Found:
    clients = new_clients(given, ("client",))
    server = new_part(given, "server")
    optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)
    ledger = Ledger()
    relay = Relay(given, ledger)
    for t in range(given.rounds):
        for client, steps in visits(given, cohort_of(given, clients, t), t):
            relay.bring(t, client)
            for k in steps:
                inputs, target = given.batches[t, client.number, k]
                z = client.parts["client"](inputs)
                ledger.bill_upload(t, client.number, z, target)
                reply = serve(given, server, optimizer, z, target)
                ledger.bill(t, client.number, "down", "cut gradients", [reply])
                step_on_cut_gradient(client, z, reply)
            relay.take(t, [client])
    return Found(relay.x_c, state(given, "server", server), {}, dict(ledger.bytes))


def visits(given: Given, cohort: list[Client], t: int) -> Iterator[tuple[Client, list[int]]]:
    """In order of their turns: a client, and the steps that it takes in this visit."""
    if given.alternate:
        for k, present in interleaved(given, cohort, t):
            for client in present:
                yield client, [k]
    else:
        for client in cohort:
            yield client, [k for k, _ in interleaved(given, [client], t)]


class Relay:
    """The F-server between two visits: it holds x_c, and the optimizer's state if that is handed on."""

    def __init__(self, given: Given, ledger: Ledger) -> None:
        self.given = given
        self.ledger = ledger
        self.x_c = dict(given.initial["client"])
        self.optimizer_state: OptimizerState | None = None
        for number in given.cohorts[0]:
            ledger.bill(-1, number, "down", "first download", frozen(given, ("client",)))

    def bring(self, t: int, client: Client) -> None:
        """The start of a visit."""
        if t > 0 and client.last_round is None:
            self.ledger.bill(t, client.number, "down", "first download", frozen(self.given, ("client",)))
        client.last_round = t
        start_optimizers(self.given, client.optimizers.values())
        load(client.parts["client"], self.x_c)
        self.ledger.bill(t, client.number, "down", "client model", self.x_c.values())
        if self.optimizer_state is not None:
            load_optimizer(client.optimizers["client"], self.optimizer_state)
            self.ledger.bill(t, client.number, "down", "optimizer state", billed(self.optimizer_state))

    def take(self, t: int, members: list[Client]) -> None:
        """The end of a visit; in CPSL of several clients at once, whose weights and optimizer states are averaged."""
        self.x_c = average_part(self.given, "client", members)
        for client in members:
            self.ledger.bill(t, client.number, "up", "client model", self.x_c.values())
        if self.given.hands_on_optimizer:
            states = [deepcopy(client.optimizers["client"].state_dict()["state"]) for client in members]
            for client, own in zip(members, states, strict=True):
                self.ledger.bill(t, client.number, "up", "optimizer state", billed(own))
            self.optimizer_state = average_states(states, [self.given.weights[client.number] for client in members])


def load_optimizer(optimizer: Optimizer, handed_on: OptimizerState) -> None:
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": deepcopy(handed_on), "param_groups": groups})


def billed(optimizer_state: OptimizerState) -> Iterable[Tensor]:
    """All but the step counters, and but what SGD without momentum does not remember."""
    for remembered in optimizer_state.values():
        yield from (value for name, value in remembered.items() if name != "step" and value is not None)


def average_states(states: list[OptimizerState], weights: list[float]) -> OptimizerState:
    """The weighted mean of everything but step counters, of which it is the largest."""
    total = sum(weights)
    mean: OptimizerState = {}
    for index, first in states[0].items():
        mean[index] = {}
        for name, value in first.items():
            values = [one[index][name] for one in states]
            if name == "step":
                mean[index][name] = torch.stack(values).amax(dim=0)
            elif value is not None:
                mean[index][name] = sum(w / total * one for one, w in zip(values, weights, strict=True))
    return mean

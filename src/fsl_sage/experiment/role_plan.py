"""What the roles of an algorithm do in a step, in order, before anything runs.

An algorithm's own code is played on shapes by roles that write down what they are asked: a forward pass whose graph
stays open, a backward pass that closes it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fsl_sage.alignment.passes import Smash
from fsl_sage.config import Config
from fsl_sage.engines.base import Delivery, Replies, Setup, advance
from fsl_sage.engines.dry import DryClient, DryEngine
from fsl_sage.engines.dry_server import DrySServer
from fsl_sage.engines.server import HostedServer, NoServer
from fsl_sage.experiment.federation import draw_cohort
from fsl_sage.experiment.setup import make_dry_setup
from fsl_sage.problems.base import Batch, Problem
from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import Message


class Event(NamedTuple):
    """One thing that a role does in a step."""

    what: str
    """open: a forward pass with a graph; close: its backward pass; pass: a forward pass without one; step: of the
    optimizers; direction: one in the space of the weights; moved and back: between them there is a copy of the weights;
    again: a forward pass whose memory is not counted.
    """
    part: str = ""
    samples: int = 0
    cut_gradient: bool = True


class Plan(NamedTuple):
    """What client and S-server do in their first steps, in order."""

    client: list[Event]
    server: list[Event]
    copies: int
    """Server-side models besides the shared one, which is then not trained itself."""
    holds: bool = False
    """Whether a client keeps the weights of its part twice."""


class _Client(DryClient):
    """A client that takes one step and writes down what it is asked."""

    def __init__(self, id: int, engine: DryEngine, setup: Setup) -> None:
        super().__init__(id, engine, Delivery(setup.initial, {}))
        self.events: list[Event] = []
        self._opened: list[str] = []
        self._samples = 0
        self._at_it = False
        self.holds = False
        """Whether it keeps the weights of the client part twice."""

    def batches(self, t: int, steps: range | None = None) -> Iterator[Batch]:
        for batch in islice(super().batches(t, steps), 1):
            self._samples, self._at_it = _samples(batch.inputs), True
            yield batch
            self._at_it = False

    def own_examples(self) -> Iterator[Batch]:
        yield from islice(super().own_examples(), 1)

    def _note(self, what: str, part: str = "") -> None:
        if self._at_it:
            self.events.append(Event(what, part, self._samples))

    def _through(self, part: str) -> None:
        self._note("open", part)
        self._note("close", part)

    def forward(self, batch: Batch) -> Smash:
        self._open("client")
        return super().forward(batch)

    def output(self, part: str, *inputs: Tensor) -> Any:
        self._open(part)
        return super().output(part, *inputs)

    def _open(self, part: str) -> None:
        self._opened.append(part)
        self._note("open", part)

    def infer(self, batch: Batch, part: str) -> tuple[Smash, Any]:
        at_it, self._at_it = self._at_it, False
        found = super().infer(batch, part)
        self._at_it = at_it
        self._note("pass", "client")
        self._note("pass", part)
        return found

    def auxiliary_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        self._through("auxiliary")
        return super().auxiliary_gradient(z, target)

    def server_gradient(self, z: Smash, target: Mapping[str, Tensor]) -> Smash:
        self._through("server")
        return super().server_gradient(z, target)

    def gradient(self, part: str, z: Smash, loss: Callable[[Any], Tensor]) -> Smash:
        self._through(part)
        return super().gradient(part, z, loss)

    def held(self, batch: Batch, z: Smash, gradient: Smash, strength: float) -> Smash:
        self._note("again", "client")
        self.holds = True
        return super().held(batch, z, gradient, strength)

    def backward(self, z: Smash, gradient: Smash) -> None:
        self._note("close", "client")
        self._opened = [part for part in self._opened if part != "client"]

    def minimise(self, loss: Tensor) -> None:
        for part in reversed(self._opened):
            self._note("close", part)
        self._opened = []
        self.step()

    def step(self, **lr: float) -> None:
        self._note("step")

    def loss(self, batch: Batch, part: str, *, leaves_trace: bool = True) -> tuple[Smash, Tensor]:
        self._note("pass", "client")
        self._note("pass", part)
        return DryClient.forward(self, batch), torch.empty((), device="meta")

    def direction(self) -> Tensor:
        self._note("direction")
        return super().direction()

    @contextmanager
    def moved(self, u: Tensor, by: float) -> Iterator[None]:
        self._note("moved")
        yield
        self._note("back")


class _SServer(DrySServer):
    """An S-server that writes down what it is asked up to its first optimizer step."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.events: list[Event] = []
        self.copies: set[int] = set()
        self._opened: list[Event] = []

    def _note(self, what: str, samples: int = 0, *, cut_gradient: bool = True) -> None:
        if not any(event.what == "step" for event in self.events):
            self.events.append(Event(what, "server", samples, cut_gradient))

    def _through(self, smashed: Message, *, cut_gradient: bool) -> None:
        for what in ("open", "close"):
            self._note(what, len(smashed.smashed[0]), cut_gradient=cut_gradient)

    def learn(self, client: int, smashed: Message, *, cut_gradient: bool = False, own_copy: bool = False) -> Smash:
        if own_copy:
            self.copies.add(client)
        self._through(smashed, cut_gradient=cut_gradient)
        self._note("step")
        return super().learn(client, smashed, cut_gradient=cut_gradient, own_copy=own_copy)

    def join(self, client: int, smashed: Message, share: float) -> Smash:
        self._through(smashed, cut_gradient=True)
        return super().join(client, smashed, share)

    def step(self, step: int) -> None:
        self._note("step")

    def output(self, *z: Tensor, leaves_trace: bool = True) -> Any:
        self._note("open", len(z[0]), cut_gradient=False)
        self._opened.append(Event("close", "server", len(z[0]), cut_gradient=False))
        return super().output(*z, leaves_trace=leaves_trace)

    def infer(self, *z: Tensor) -> Any:
        self._note("pass", len(z[0]))
        return super().infer(*z)

    def join_loss(self, loss: Tensor) -> None:
        for event in reversed(self._opened):
            self._note("close", event.samples, cut_gradient=False)
        self._opened = []

    def minimise(self, loss: Tensor, share: float) -> None:
        self.join_loss(loss)
        self._note("step")


def _samples(inputs: Any) -> int:
    return next(len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))


def plan_of(config: Config, problem: Problem, cut: str) -> Plan:
    """What the roles of the configured algorithm do in their first steps; it is the same at every cut."""
    config = replace(config, model=replace(config.model, cut=cut), local_steps=1)
    setup = make_dry_setup(config, problem, [config.batch_size] * config.clients)
    engine, algorithm = DryEngine(setup), setup.algorithm
    group = algorithm.turns(0, draw_cohort(config, 0), dict.fromkeys(range(config.clients), 1))[0]
    players = {id: _Client(id, engine, setup) for id in sorted(group)}
    rounds = {id: algorithm.local_round(player, 0) for id, player in players.items()}
    role = _SServer(setup)
    server = HostedServer(setup, role) if algorithm.has_s_server else NoServer()
    replies: Replies = dict.fromkeys(players)
    while replies:
        uploads = {id: said for id, reply in replies.items() if (said := advance(rounds[id], reply)) is not None}
        numbered = {id: replace(said, values={**said.values, "step": 0}) for id, said in uploads.items()}
        replies = server.exchange(numbered, Link(Ledger()))
    server.end_of_round(0)
    first = next(iter(players.values()))
    return Plan(first.events, role.events, len(role.copies), first.holds)

"""The server's side of Flower: the S-server, averaging and evaluation. The clients are at the nodes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid
from torch import Tensor

from fsl_sage.engines.base import Delivery, Engine, Setup
from fsl_sage.engines.flower.contents import FINISH, Assignment, Report
from fsl_sage.engines.flower.courier import POLL, Courier
from fsl_sage.engines.flower.foundation import Foundation
from fsl_sage.engines.flower.inspection import Inspector, RejectedError
from fsl_sage.engines.flower.laying import Laying
from fsl_sage.engines.flower.node_state import NEVER
from fsl_sage.engines.flower.roster import Roster
from fsl_sage.engines.intake import Intake, learn_from
from fsl_sage.engines.server import host_server
from fsl_sage.engines.threads import Threads
from fsl_sage.engines.worker import evaluate
from fsl_sage.errors import TrainingError
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import Tensors
from fsl_sage.wire.paths import below, flat

GRACE = 60.0
"""Seconds for which Flower keeps a message beyond its round, so that this engine decides whether a reply is late."""


@dataclass(frozen=True)
class Rules:
    """How long a round waits, and for how many clients."""

    timeout: float = 3600.0
    """Seconds that the clients have for a round."""
    minimum: int = 1
    """The smallest number of clients that makes a round."""
    join_timeout: float = 120.0
    """Seconds that the first round waits for all clients to connect, and any round for the smallest number."""


class FlowerEngine(Engine):
    """One message and one reply a client a round."""

    def __init__(
        self, setup: Setup, grid: Grid, inspector: Inspector, rules: Rules, tell: Callable[[str], None] = print
    ) -> None:
        """Start the engine.

        Args:
            setup: The run. Its clients are at the nodes.
            grid: Flower's connection to the nodes.
            inspector: Checks every reply.
            rules: How long a round waits, and for how many clients.
            tell: Is called with sentences for the log.
        """
        self.setup = setup
        self._threads = Threads(setup)
        self.server = self._server = host_server(setup, self._threads.spread)
        self._courier = Courier(grid)
        self._roster = Roster(self._courier, len(setup.examples), tell)
        self._laying = Laying(*Foundation.of(setup), inspector.run, tell)
        self._inspector = inspector
        self._rules = rules
        self._tell = tell
        self._started = False
        self._has: dict[int, Parts] = {}
        """By client, the weights that were sent to it. A new process does not know them and sends all of them again."""
        self._version: dict[int, int] = {}
        """By client, the version of the averaged weights among them."""
        self._last = dict.fromkeys(range(len(setup.examples)), NEVER)
        """By client, the last round whose report was accepted. The client continues from its state after that round."""
        self._checkpointed = dict(self._last)
        self._remarks: dict[str, dict[str, str]] = {}
        self._nodes: dict[int, int] = {}
        """By client that is present in the round, its node."""

    # Rounds

    def present(self, t: int, clients: Sequence[int]) -> list[int]:
        """Those that are connected and have what they start from, when there are enough. Only they are billed."""
        self._remarks = {"failures": {}, "rejected": {}}
        self._nodes = self._founded(self._gather(t, clients))
        self._require(t, clients, len(self._nodes), "got the weights that they start from")
        return [client for client in clients if client in self._nodes]

    def train(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> list[Update]:
        """Send every client that is present its message. The S-server learns from the replies that pass inspection."""
        nodes = {client: self._nodes[client] for client in clients}
        held = self._held(delivery.received)
        messages = {client: self._message("train", t, client, nodes[client], held, delivery) for client in nodes}
        answers = self._courier.exchange(messages, self._rules.timeout)
        # In the order of clients, not of arrival.
        reports = {
            client: report
            for client in sorted(answers)
            if (report := self._inspect(t, client, nodes[client], answers[client], delivery.measured)) is not None
        }
        self._require(t, clients, len(reports), "answered")
        self._learn(t, reports, link)
        for client in reports:
            self._has[client] = held
            self._version[client] = delivery.version
            self._last[client] = t
        return [
            Update(client, report.parts, report.losses, report.extra, report.footprint)
            for client, report in reports.items()
        ]

    def _learn(self, t: int, reports: Mapping[int, Report], link: Link) -> None:
        """The S-server takes all uploads of the round, in the configured order."""
        self._server.begin(t)
        intake = Intake.in_order(self.setup.settings.config.order, list(reports))
        for client, report in reports.items():
            for upload in report.uploads:
                intake.put(client, upload)
            intake.close(client)
        learn_from(intake, self._server, link)

    def _gather(self, t: int, clients: Sequence[int]) -> dict[int, int]:
        """The nodes of the clients that are connected, when there are enough."""
        nodes = self._awaited(clients, min(self._rules.minimum, len(clients)) if self._started else len(clients))
        self._require(t, clients, len(nodes), "are connected")
        self._started = True
        for client in sorted(set(clients) - nodes.keys()):
            self._note("failures", client, "it is not connected")
        return nodes

    def _awaited(self, clients: Sequence[int], enough: int) -> dict[int, int]:
        """The nodes of the clients that are connected, when there are enough or the time to join is over."""
        deadline = time.monotonic() + self._rules.join_timeout
        while True:
            last_look = time.monotonic() > deadline
            present = self._roster.present()
            nodes = {client: present[client] for client in clients if client in present}
            if last_look or len(nodes) >= enough:
                return nodes
            time.sleep(POLL)

    def _founded(self, nodes: Mapping[int, int]) -> dict[int, int]:
        """The nodes whose clients have the foundation of their parts, or get it with the round."""
        failed = self._laying.send(nodes, self._courier, self._rules.timeout)
        for client, reason in failed.items():
            self._note("failures", client, reason)
        return {client: node for client, node in nodes.items() if client not in failed}

    def _held(self, received: Parts) -> Parts:
        """The newest weights of all parts that a client holds."""
        return {part: received.get(part, self.setup.initial[part]) for part in self.setup.algorithm.holds}

    def _message(self, kind: str, t: int, client: int, node: int, held: Parts, delivery: Delivery) -> FlowerMessage:
        had = self._has.get(client, {})
        mail, mail_changes = delivery.mail.get(client, {}), delivery.changes.get(client, {})
        # A message that waits for the client replaces the part that it would hold otherwise.
        lacks = {
            part: tensors
            for part, tensors in held.items()
            if had.get(part) is not tensors and (part in had or self.setup.algorithm.kind(part) not in mail)
        }
        changes = self._changes(client, lacks, delivery)
        assignment = Assignment(
            self._inspector.run,
            t,
            client,
            after=self._last[client],
            keep=self._checkpointed[client],
            held={part: own for part, own in lacks.items() if self.setup.algorithm.kind(part) not in changes},
            mail={kind: own for kind, own in mail.items() if kind not in mail_changes},
            extra=delivery.extra,
            changes=changes,
            mail_changes=mail_changes,
            foundation=self._laying.block if client not in self._has and not self._laying.comes_first else None,
            measured=client == delivery.measured,
        )
        return FlowerMessage(assignment.content(), node, kind, ttl=self._rules.timeout + GRACE, group_id=str(t))

    def _changes(self, client: int, lacks: Parts, delivery: Delivery) -> dict[str, Tensors]:
        """By kind, the coded difference that is sent instead of weights, where the client has an earlier version."""
        changes = dict(delivery.renewal.for_all)
        if self._version.get(client) == delivery.version - 1:
            changes |= delivery.renewal.changes
        kinds = {self.setup.algorithm.kind(part) for part in lacks if part in self._has.get(client, {})}
        return {kind: change for kind, change in changes.items() if kind in kinds}

    def _inspect(
        self, t: int, client: int, node: int, answer: FlowerMessage | str, measured: int | None
    ) -> Report | None:
        if isinstance(answer, str):
            self._note("failures", client, answer)
            self._laying.forget(client)
            return None
        try:
            return self._inspector.inspect(answer.content, t, client, measured=client == measured)
        except RejectedError as error:
            self._note("rejected", client, f"node {node}: {error}")
            return None

    def _note(self, kind: str, client: int, reason: str) -> None:
        self._remarks[kind][str(client)] = reason
        self._tell(f"Client {client} is missing: {reason}")

    def _require(self, t: int, clients: Sequence[int], count: int, what: str) -> None:
        if count < min(self._rules.minimum, len(clients)):
            raise TrainingError(
                f"Only {count} of {len(clients)} clients {what} in round {t}, but 'minimum' is {self._rules.minimum}; "
                "the last checkpoint is kept: continue with the same 'flwr run'."
            )

    def remarks(self) -> dict[str, Any]:
        """The clients that were missing in this round and the reasons: failures, and replies that were rejected."""
        return dict(self._remarks)

    def finish(self, t: int, delivery: Delivery) -> list[int]:
        """After the last round: every client that is connected gets the final weights and drops its states.

        Returns the clients that have them. A process that has played no round waits for all clients to connect.
        """
        held = self._held(delivery.received)
        clients = range(len(self.setup.examples))
        nodes = self._awaited(clients, 0 if self._started else len(clients))
        messages = {
            client: self._message(f"query.{FINISH}", t, client, node, held, delivery) for client, node in nodes.items()
        }
        answers = self._courier.exchange(messages, self._rules.timeout)
        for client, answer in answers.items():
            if isinstance(answer, str):
                self._tell(f"Client {client} did not get the final weights: {answer}")
        return [client for client, answer in answers.items() if not isinstance(answer, str)]

    def evaluate(self, parts: Parts) -> dict[str, Any]:
        """Metrics of the merged model on the server's own test set."""
        return evaluate(self.setup.settings, parts, self._threads.spread)

    def local_tensors(self) -> dict[int, Parts]:
        """Nothing: the clients' own tensors stay at their nodes."""
        return {}

    # State

    def state(self) -> Tensors:
        """The S-server's state, and for each client the round whose state its node must keep."""
        self._checkpointed = dict(self._last)
        own = {"last": torch.tensor(list(self._last.values())), "named": torch.tensor(self._roster.named)}
        return {**own, **flat({"server": self._server.state()})}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; the nodes go back to the matching rounds with their next message."""
        self._last = dict(enumerate(state["last"].tolist()))
        self._checkpointed = dict(self._last)
        self._roster.named = bool(state["named"])
        self._has, self._version = {}, {}
        self._server.load_state(below("server/", state))

    def close(self) -> None:
        """Stop the threads."""
        self._threads.close()

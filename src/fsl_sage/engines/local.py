"""The default engine: one process. Clients that don't wait train side by side in threads, each with its own modules,
and the S-server learns from what they have uploaded meanwhile.

The numbers do not depend on the number of workers: a client's round depends on nothing but its state and what came
down, the S-server takes uploads in a fixed order, and sums run in client order.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fsl_sage.activity import now
from fsl_sage.engines.base import ClientError, Delivery, Engine, Failures, Outcome, Replies, Setup, survivors
from fsl_sage.engines.intake import Intake, learn_from
from fsl_sage.engines.server import host_server, join_states, local_tensors, part_states
from fsl_sage.engines.threads import Threads
from fsl_sage.engines.worker import Conversation, copied, evaluate
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import Message, Tensors

Outcomes = dict[int, Outcome | ClientError]


class LocalEngine(Engine):
    """Threads in one process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._threads = Threads(setup)
        self._clients: dict[int, Tensors] = {}
        self._failures = Failures(setup.settings.config.on_client_failure)
        self.server = self._server = host_server(setup, self._threads.spread)

    # Rounds

    def train(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> list[Update]:
        """Clients that wait go step by step together; the others run their whole round in parallel."""
        self._server.begin(t)
        outcomes: Outcomes = {}
        if not self.setup.algorithm.waits_in(t):
            outcomes = self._run_in_parallel(t, clients, delivery, link)
        else:
            blocked = self.setup.settings.config.order == "blocked"
            for group in [[client] for client in clients] if blocked else [clients]:
                outcomes |= self._run_in_step(t, group, delivery, link)
        finished = survivors(outcomes)
        self._clients |= {id: outcome.state for id, outcome in finished.items()}
        return [outcome.update for outcome in finished.values()]

    def _run_in_parallel(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> Outcomes:
        intake = Intake.in_order(self.setup.settings.config.order, clients)
        begun = itertools.count(1)

        def whole_round(id: int) -> Outcome | ClientError:
            try:
                with self._threads.free_worker() as worker:
                    now(f"training client {next(begun)} of {len(clients)}")
                    return worker.whole_round(t, id, self._state(id), delivery, partial(intake.put, id))
            finally:
                intake.close(id)

        rounds: Iterable[Outcome | ClientError] = self._threads.map(whole_round, clients)
        if len(self._threads.workers) == 1:  # nothing else runs beside the client that is measured
            rounds = list(rounds)
        learn_from(intake, self._server, link)
        outcomes = dict(zip(clients, rounds, strict=True))
        for id in self._failures.note(outcomes):
            self._server.drop(id)
        return outcomes

    def _run_in_step(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> Outcomes:
        """Run every client to its next upload, take the S-server's replies, and repeat."""
        # A client stays with its worker, in whose modules its graph is recorded.
        workers = self._threads.workers
        shares = [clients[place :: len(workers)] for place in range(len(workers))]
        conversations: dict[int, Conversation] = {
            id: worker.converse(t, id, self._state(id), delivery)
            for worker, share in zip(workers, shares, strict=True)
            for id in share
        }
        replies: Replies = dict.fromkeys(clients)
        outcomes: Outcomes = {}
        steps = itertools.count(1)
        while replies:
            now(f"training {len(replies)} clients, exchange {next(steps)}")

            def on(share: Sequence[int], replies: Replies = replies) -> dict[int, Message | Outcome | ClientError]:
                return {id: conversations[id](replies[id]) for id in share if id in replies}

            said = {id: word for share in self._threads.map(on, shares) for id, word in share.items()}
            ended = {id: word for id, word in said.items() if not isinstance(word, Message)}
            for id in self._failures.note(ended):
                self._server.drop(id)
            outcomes |= ended
            uploads = {id: word for id in clients if isinstance(word := said.get(id), Message)}
            replies = self._server.exchange(uploads, link)
        return {id: outcomes[id] for id in clients}

    def _state(self, id: int) -> Tensors:
        """A client's state. It is trained in place, unless a client may fail: it then returns with a copy."""
        state = self._clients.get(id, {})
        return copied(state) if self.setup.settings.config.on_client_failure == "drop" else state

    def remarks(self) -> dict[str, Any]:
        """Clients that failed in this round, and why."""
        return self._failures.told()

    def evaluate(self, parts: Parts) -> dict[str, Any]:
        """The test set's batches are shared out among the workers."""
        return evaluate(self.setup.settings, parts, self._threads.spread)

    def local_tensors(self) -> dict[int, Parts]:
        """By client, in order: the tensors that it keeps for itself."""
        return local_tensors(self.setup, self._clients)

    # State

    def state(self) -> Tensors:
        """`clients/ID/…` and `server/…`."""
        return join_states(self._clients, self._server.state())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        device = self.setup.settings.device
        self._clients, server = part_states({path: tensor.to(device) for path, tensor in state.items()})
        self._server.load_state(server)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.close()

"""The default engine: one process. Clients that don't wait train side by side in threads, each with its own modules,
and the S-server learns from what they have uploaded meanwhile.

The numbers do not depend on the number of workers: a client's round depends on nothing but its state and what came
down, the S-server takes uploads in a fixed order, and sums run in client order.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.engines.base import ClientError, Delivery, Engine, Failures, Outcome, Setup, failed, survivors
from fsl_sage.engines.intake import Intake
from fsl_sage.engines.process import prepare_process
from fsl_sage.engines.server import Replies, ServerSide, Uploads, join_states, local_tensors, part_states
from fsl_sage.engines.worker import Play, Worker, copied, evaluate
from fsl_sage.roles.f_server import Update
from fsl_sage.roles.s_server import Job
from fsl_sage.roles.work import Parts
from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.message import Message, Tensors

Outcomes = dict[int, Outcome | ClientError]


class LocalEngine(Engine):
    """Threads in one process."""

    def __init__(self, setup: Setup) -> None:
        config = setup.settings.config
        self.setup = setup
        # torch's CPU generator is shared between threads: a model that draws in forward runs one client at a time.
        workers = 1 if setup.settings.draws else min(config.workers or os.cpu_count() or 1, len(setup.examples))
        self._threads_before = torch.get_num_threads()
        prepare_process(config.threads)
        self._workers = [Worker(setup) for _ in range(workers)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._pool = ThreadPoolExecutor(workers, "client", torch.set_num_threads, (config.threads,))
        self._clients: dict[int, Tensors] = {}
        self._failures = Failures(config.on_client_failure)
        self._server = ServerSide(setup, self._spread) if setup.algorithm.has_s_server else None

    # Rounds

    def train(self, t: int, clients: Sequence[int], delivery: Delivery, ledger: Ledger) -> list[Update]:
        """Clients that wait go step by step together; the others run their whole round in parallel."""
        config = self.setup.settings.config
        if self._server is not None:
            self._server.begin(t)
        outcomes: Outcomes = {}
        if not self.setup.algorithm.waits_in(t):
            outcomes = self._run_in_parallel(t, clients, delivery, ledger)
        else:
            for group in [[client] for client in clients] if config.order == "blocked" else [clients]:
                outcomes |= self._run_in_step(t, group, delivery, ledger)
        finished = survivors(outcomes)
        self._clients |= {id: outcome.state for id, outcome in finished.items()}
        return [outcome.update for outcome in finished.values()]

    def _run_in_parallel(self, t: int, clients: Sequence[int], delivery: Delivery, ledger: Ledger) -> Outcomes:
        intake = self._intake(clients)

        def whole_round(id: int) -> Outcome | ClientError:
            worker = self._free.get()
            try:
                return worker.whole_round(t, id, self._state(id), delivery, partial(intake.put, id))
            finally:
                self._free.put(worker)
                intake.close(id)

        rounds: Iterable[Outcome | ClientError] = self._pool.map(whole_round, clients)
        if len(self._workers) == 1:  # nothing beside the one that was asked for
            rounds = list(rounds)
        self._learn(intake, ledger)
        outcomes = dict(zip(clients, rounds, strict=True))
        self._failures.note(outcomes)
        return outcomes

    def take(self, t: int, sent: Mapping[int, Sequence[Message]], ledger: Ledger) -> None:
        """The S-server's part in round t when its clients did not wait: their uploads, in the configured order."""
        if self._server is not None:
            self._server.begin(t)
        intake = self._intake(list(sent))
        for id, uploads in sent.items():
            for upload in uploads:
                intake.put(id, upload)
            intake.close(id)
        self._learn(intake, ledger)

    def _intake(self, clients: Sequence[int]) -> Intake:
        # Threads have no order of arrival that means anything.
        order = self.setup.settings.config.order
        return Intake("interleaved" if order == "arrival" else order, clients)

    def _learn(self, intake: Intake, ledger: Ledger) -> None:
        """The S-server takes the uploads of the round, to the last, while clients may still be at it."""
        for uploads in intake:
            self._exchange(uploads, ledger)

    def _run_in_step(self, t: int, clients: Sequence[int], delivery: Delivery, ledger: Ledger) -> Outcomes:
        """Every client up to its next upload, the S-server's replies, and on."""
        # A client stays with its worker, in whose modules its graph is recorded.
        shares = [clients[place :: len(self._workers)] for place in range(len(self._workers))]
        plays: dict[int, Play] = {
            id: worker.play(t, id, self._state(id), delivery)
            for worker, share in zip(self._workers, shares, strict=True)
            for id in share
        }
        replies: Replies = dict.fromkeys(clients)
        outcomes: Outcomes = {}
        while replies:

            def on(share: Sequence[int], replies: Replies = replies) -> dict[int, Message | Outcome | ClientError]:
                return {id: plays[id](replies[id]) for id in share if id in replies}

            said = {id: word for share in self._pool.map(on, shares) for id, word in share.items()}
            ended = {id: word for id, word in said.items() if not isinstance(word, Message)}
            self._failures.note(ended)
            for id in failed(ended):
                self._drop(id)
            outcomes |= ended
            uploads = {id: word for id in clients if isinstance(word := said.get(id), Message)}
            replies = self._exchange(uploads, ledger)
        return {id: outcomes[id] for id in clients}

    def _drop(self, id: int) -> None:
        if self._server is not None:
            self._server.drop(id)

    def _exchange(self, uploads: Uploads, ledger: Ledger) -> Replies:
        if not uploads:
            return {}
        assert self._server is not None, "an algorithm without an S-server must not upload"
        return self._server.exchange(uploads, ledger)

    def _state(self, id: int) -> Tensors:
        """A client's state. It is trained in place, unless the client may fail and be back with what it had."""
        state = self._clients.get(id, {})
        return copied(state) if self.setup.settings.config.on_client_failure == "drop" else state

    def remarks(self) -> dict[str, Any]:
        """Whether this round aligned; clients that failed in it, and why."""
        aligned = self._server.remarks() if self._server is not None else super().remarks()
        return {**aligned, **self._failures.told()}

    # After the averaging

    def share_auxiliary(self, tensors: Tensors) -> None:
        """Nothing to carry: the S-server is here."""
        if self._server is not None:
            self._server.share_auxiliary(tensors)

    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """Alignment, where the algorithm has one."""
        return self._server.end_of_round(t) if self._server is not None else []

    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """On a few clients' newest uploads."""
        return self._server.fidelity(seen) if self._server is not None else None

    def recalibrated(self) -> Tensors | None:
        """The S-server's model with BatchNorm statistics estimated anew."""
        return self._server.recalibrated() if self._server is not None else None

    def server_loss(self) -> float | None:
        """Mean over the steps since the last call."""
        return self._server.loss() if self._server is not None else None

    def server_weights(self) -> Tensors | None:
        """The S-server's model."""
        return self._server.weights() if self._server is not None else None

    def evaluate(self, parts: Parts) -> dict[str, float]:
        """The test set's batches are shared out among the workers."""
        return evaluate(self.setup.settings, parts, self._spread)

    def local_tensors(self) -> list[Parts]:
        """By client, in order."""
        return local_tensors(self.setup, self._clients)

    # State

    def state(self) -> Tensors:
        """`clients/ID/…` and `server/…`."""
        return join_states(self._clients, self._server.state() if self._server is not None else None)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left."""
        device = self.setup.settings.device
        self._clients, server = part_states({path: tensor.to(device) for path, tensor in state.items()})
        if self._server is not None:
            self._server.load_state(server)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)

    def _spread(self, job: Job, shared: Any, items: Sequence[Any]) -> list[Any]:
        """Side by side, each item with a free worker's modules; results in the order of the items."""

        def one(item: Any) -> Any:
            worker = self._free.get()
            try:
                return job(worker.workbench, self.setup.settings, shared, item)
            finally:
                self._free.put(worker)

        return list(self._pool.map(one, items))

"""The default engine: one process. Clients that don't wait train side by side in threads, each with its own modules.

The numbers do not depend on the number of workers: a client's round depends on nothing but its state and what came
down, the S-server takes uploads in a fixed order, and sums run in client order.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fsl_sage.algorithms.base import LocalRound
from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.engines.base import Delivery, Engine, Setup, advance, bill
from fsl_sage.errors import InputError
from fsl_sage.roles.client import Client, below
from fsl_sage.roles.f_server import Update
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.s_server import SServer, by_client
from fsl_sage.roles.work import Parts, Workbench, boundary
from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.message import Message, Tensors

Uploads = dict[int, Message]
"""Uploads of one step by client."""


@dataclass
class _Finished:
    """A client's whole round, when it did not have to wait for anyone."""

    uploads: list[tuple[int, Message]]  # (step, upload)
    update: Update
    state: Tensors


class LocalEngine(Engine):
    """Threads in one process."""

    def __init__(self, setup: Setup) -> None:
        config = setup.settings.config
        if config.order == "arrival":
            raise InputError("--order arrival needs an engine with real parallelism: give interleaved or blocked.")
        self.setup = setup
        # torch's CPU generator is shared between threads: a model that draws in forward runs one client at a time.
        workers = 1 if setup.settings.draws else min(config.workers or os.cpu_count() or 1, len(setup.examples))
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(config.threads)
        self._workbenches = [Workbench(setup.modules) for _ in range(workers)]
        self._free: SimpleQueue[Workbench] = SimpleQueue()
        for workbench in self._workbenches:
            self._free.put(workbench)
        self._pool = ThreadPoolExecutor(workers, "client", torch.set_num_threads, (config.threads,))
        self._clients: dict[int, Tensors] = {}
        self._server: SServer | None = None
        if setup.algorithm.has_s_server:
            bench = Workbench({"server": setup.modules["server"]})
            self._server = SServer(setup.settings, bench, setup.initial, setup.client_weights, self._spread)

    # Rounds

    def train(self, t: int, clients: Sequence[int], delivery: Delivery, ledger: Ledger) -> list[Update]:
        """Clients that wait go step by step together; the others run their whole round in parallel."""
        if self._server is not None:
            self._server.round = t
        if not self.setup.algorithm.waits:
            return self._run_in_parallel(t, clients, delivery, ledger)
        together = [[client] for client in clients] if self.setup.settings.config.order == "blocked" else [clients]
        return [update for group in together for update in self._run_in_step(t, group, delivery, ledger)]

    def _run_in_parallel(self, t: int, clients: Sequence[int], delivery: Delivery, ledger: Ledger) -> list[Update]:
        def whole_round(workbench: Workbench, id: int) -> _Finished:
            client = self._client(id, t, workbench, delivery)
            # `step_index` is read as each upload is made, before the generator goes on.
            uploads = [(client.step_index, upload) for upload in self.setup.algorithm.local_round(client, t)]
            return _Finished(uploads, *self._finish(client, t))

        finished = dict(zip(clients, self._spread(whole_round, clients), strict=True))
        for uploads in self._in_order({id: outcome.uploads for id, outcome in finished.items()}):
            self._exchange(t, uploads, ledger)
        for id, outcome in finished.items():
            self._clients[id] = outcome.state
        return [outcome.update for outcome in finished.values()]

    def _in_order(self, uploads: dict[int, list[tuple[int, Message]]]) -> Iterator[Uploads]:
        """The order in which the S-server takes what clients sent without waiting."""
        tagged = {id: [(k, _tag(upload, k)) for k, upload in sent] for id, sent in uploads.items()}
        if self.setup.settings.config.order == "blocked":
            yield from ({id: upload} for id, sent in tagged.items() for _, upload in sent)
            return
        for step in sorted({k for sent in tagged.values() for k, _ in sent}):
            yield {id: upload for id, sent in tagged.items() for k, upload in sent if k == step}

    def _run_in_step(self, t: int, clients: Sequence[int], delivery: Delivery, ledger: Ledger) -> list[Update]:
        """Every client up to its next upload, the S-server's replies, and on."""
        workers = len(self._workbenches)
        live = {
            id: self._client(id, t, self._workbenches[place % workers], delivery) for place, id in enumerate(clients)
        }
        rounds: dict[int, LocalRound] = {id: self.setup.algorithm.local_round(live[id], t) for id in clients}
        replies: dict[int, Message | None] = dict.fromkeys(clients)
        running = list(clients)
        while running:

            def on(mine: list[int], replies: Mapping[int, Message | None] = replies) -> Uploads:
                sent = {id: advance(rounds[id], replies[id]) for id in mine}
                return {id: _tag(upload, live[id].step_index) for id, upload in sent.items() if upload is not None}

            # A client stays with its worker, in whose modules its graph was recorded.
            shares = [[id for place, id in enumerate(clients) if place % workers == w] for w in range(workers)]
            shares = [[id for id in share if id in running] for share in shares]
            uploads = {id: up for share in self._pool.map(on, shares) for id, up in share.items()}
            running = [id for id in running if id in uploads]
            replies = self._exchange(t, {id: uploads[id] for id in running}, ledger)
        updates = []
        for id, client in live.items():
            update, self._clients[id] = self._finish(client, t)
            updates.append(update)
        return updates

    def _exchange(self, t: int, uploads: Uploads, ledger: Ledger) -> dict[int, Message | None]:
        """Uploads of one step to the S-server, its replies back; both billed."""
        for id, upload in uploads.items():
            bill(ledger, t, id, "up", upload)
        assert self._server is not None, "an algorithm without an S-server must not upload"
        replies = self.setup.algorithm.on_uploads(self._server, uploads) if uploads else {}
        for id, reply in replies.items():
            if reply is not None:
                bill(ledger, t, id, "down", reply)
        return replies

    def _client(self, id: int, t: int, workbench: Workbench, delivery: Delivery) -> Client:
        setup = self.setup
        holds = {part: setup.initial[part] for part in setup.algorithm.holds}
        trains = setup.algorithm.trained_in(t)
        client = Client(
            id,
            setup.examples[id],
            setup.settings,
            workbench,
            received=delivery.received,
            initial=holds,
            state=self._clients.get(id, {}),
            trains=trains,
        )
        if id in delivery.mail:
            setup.algorithm.on_download(client, Message(delivery.mail[id]))
        return client

    def _finish(self, client: Client, t: int) -> tuple[Update, Tensors]:
        averaged = self.setup.algorithm.averaged_in(t)
        losses = {"client_loss": _mean(client.losses)} if client.losses else {}
        return Update(client.id, client.upload(averaged), losses), client.state(averaged)

    # After the averaging

    def share_auxiliary(self, tensors: Tensors) -> None:
        """Nothing to carry: the S-server is here."""
        if self._server is not None:
            self._server.set_auxiliary(tensors)

    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """Alignment, where the algorithm has one."""
        return list(self.setup.algorithm.end_of_round(self._server, t)) if self._server is not None else []

    def fidelity(self) -> Fidelity | None:
        """On each client's newest upload."""
        return self._server.fidelity() if self._server is not None else None

    def server_loss(self) -> float | None:
        """Mean over the steps since the last call."""
        if self._server is None or not self._server.losses:
            return None
        loss = _mean(self._server.losses)
        self._server.losses.clear()
        return loss

    def server_weights(self) -> Tensors | None:
        """The S-server's model."""
        return self._server.weights() if self._server is not None else None

    def evaluate(self, parts: Parts) -> dict[str, float]:
        """The test set's batches are shared out among the workers and summed in order."""
        task, passes = self.setup.settings.task, self.setup.settings.passes

        @torch.no_grad()
        def score(workbench: Workbench, index: int) -> dict[str, float]:
            client, server = (
                Replica(workbench.slots[part], parts[part], None).module().eval() for part in ("client", "server")
            )
            batch = task.test_batch(index)
            with passes.autocast():
                z = client(**batch.inputs) if isinstance(batch.inputs, Mapping) else client(batch.inputs)
                output = server(*boundary(z))
            return task.score(output, batch.target)

        scores = self._spread(score, range(task.test_batches()))
        return task.summarise({name: sum(part[name] for part in scores) for name in scores[0]})

    def local_tensors(self) -> list[Parts]:
        """By client, in order."""
        local = self.setup.settings.stays_local
        kept: list[Parts] = []
        for _, state in sorted(self._clients.items()):
            parts = {part: below(f"own/{part}/", state) for part in self.setup.algorithm.averaged}
            kept.append({part: {n: x for n, x in own.items() if n in local[part]} for part, own in parts.items()})
        return kept

    # State

    def state(self) -> Tensors:
        """`clients/ID/…` and `server/…`."""
        state = {f"clients/{id}/{path}": x for id, kept in self._clients.items() for path, x in kept.items()}
        if self._server is not None:
            state |= {f"server/{path}": tensor for path, tensor in self._server.state().items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left."""
        device = self.setup.settings.device
        state = {path: tensor.to(device) for path, tensor in state.items()}
        self._clients = by_client(below("clients/", state))
        if self._server is not None:
            self._server.load_state(below("server/", state))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)

    def _spread(self, function: Callable[[Workbench, Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call `function` with a free workbench for each item, side by side; results in the order of the items."""

        def job(item: Any) -> Any:
            workbench = self._free.get()
            try:
                return function(workbench, item)
            finally:
                self._free.put(workbench)

        return list(self._pool.map(job, items))


def _tag(upload: Message, step: int) -> Message:
    """An upload says of which local step it is: the S-server's learning rate goes by it."""
    return replace(upload, values={**upload.values, "step": step})


def _mean(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses)).double().mean())

"""The engine on Ray: the driver's end. It hands out work and keeps references; tensors go from actor to actor."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from torch import Tensor

from fsl_sage.config import brings_modules
from fsl_sage.engines.base import ClientError, Delivery, Engine, Failures, LostError, Setup
from fsl_sage.engines.ray.arrays import carry_tensors_as_arrays, to_device
from fsl_sage.engines.ray.cluster import Crew, connect, lay_out, start_crew
from fsl_sage.engines.ray.pool import DEATHS, LOSSES, TRIES, Pool, WorkerDiedError, fetch
from fsl_sage.engines.ray.remote import RemoteServer
from fsl_sage.engines.server import NoServer, join_states, local_tensors, part_states
from fsl_sage.engines.worker import evaluate
from fsl_sage.errors import TrainingError
from fsl_sage.records.client_store import ClientStore, Named
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.units import MIB
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import Tensors

Ended = tuple[Update | ClientError, ray.ObjectRef]
"""How a client's round ended, and the reference to its new state."""


class RayEngine(Engine):
    """Workers and the S-server are actors; clients' states live in the object store and survive a worker's death."""

    def __init__(self, setup: Setup, crew: Crew | None = None) -> None:
        self.setup = setup
        config = setup.settings.config
        self._sizes = [len(examples) for examples in setup.examples]
        self._states: dict[int, ray.ObjectRef] = {}
        self._changed: set[int] = set()
        """The clients whose states are newer than the last checkpoint."""
        self.clients = self._store = ClientStore(config.client_memory_mib * MIB)
        self._failures = Failures(config.on_client_failure)
        self._own_crew: Crew | None = None
        own_modules = brings_modules(config) or not type(setup.settings.task).__module__.startswith("fsl_sage.")
        self._own_cluster = connect(config, own_modules=own_modules)
        try:
            self._start(crew)
        except BaseException:
            self.close()
            raise

    def _start(self, crew: Crew | None) -> None:
        carry_tensors_as_arrays()
        has_s_server = self.setup.algorithm.has_s_server
        if crew is None:
            layout = lay_out(self.setup.settings.config, len(self.setup.examples), has_s_server=has_s_server)
            crew = self._own_crew = start_crew(layout)
        setup = ray.put(self.setup)
        self._pool = Pool(crew.workers, setup)
        self._server = crew.server if has_s_server else None
        self.server = RemoteServer(self._call) if has_s_server else NoServer()
        self._pool.prepare()
        self._call("prepare", setup, [setup], self._pool.workers)

    # Rounds

    def train(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> list[Update]:
        """Clients that wait exchange every batch with the S-server; the others run their whole round in parallel."""
        common = ray.put((delivery.received, delivery.extra, delivery.renewed, delivery.measured))
        if self.setup.algorithm.waits_in(t):
            ended = self._run_in_exchange(t, clients, common, delivery.mail, link)
        else:
            ended = self._run_in_parallel(t, clients, common, delivery.mail, link)
        updates = []
        for id in clients:
            update, state = ended[id]
            if not isinstance(update, ClientError):
                self._states[id] = state
                self._changed.add(id)
                updates.append(to_device_of(self.setup, update))
        return updates

    def _run_in_parallel(
        self, t: int, clients: Sequence[int], common: ray.ObjectRef, mail: Mapping[int, Any], link: Link
    ) -> dict[int, Ended]:
        self._call("open", t, clients)
        learned = self._server.learn.remote() if self._server is not None else None

        def whole_round(id: int, worker: ActorHandle) -> Sequence[ray.ObjectRef]:
            state = self._states.get(id, {})
            method = worker.whole_round.options(num_returns=2)
            return method.remote(t, id, self._server, common, mail.get(id, {}), state)

        order = longest_first(clients, self._sizes)
        results = self._pool.run([partial(whole_round, id) for id in order])
        ended: dict[int, Ended] = {}
        for id, result in zip(order, results, strict=True):
            if isinstance(result, WorkerDiedError):
                if self._server is not None:
                    self._answer(self._server.close.options(concurrency_group="intake").remote(t, id))
                result = ClientError(id, t, str(result)), None
            ended[id] = result[0], result[1]
        failed = self._failures.note({id: how for id, (how, _) in ended.items() if isinstance(how, ClientError)})
        if learned is not None:
            link.ledger.load(self._answer(learned))
        for id in failed:
            self._call("ask", "drop", id)
        return ended

    def _run_in_exchange(
        self, t: int, clients: Sequence[int], common: ray.ObjectRef, mail: Mapping[int, Any], link: Link
    ) -> dict[int, Ended]:
        """A round that breaks because a worker dies starts again, from the state that the S-server has kept."""
        self._call("begin", t)
        for _ in range(TRIES):
            try:
                ended = self._exchange(t, clients, common, mail)
            except WorkerDiedError:
                self._pool.prepare()
                self._call("begin_again", t)
            else:
                link.ledger.load(self._call("end"))
                return ended
        raise TrainingError(f"Workers died in each of {TRIES} tries of round {t}; the last checkpoint is kept.")

    def _exchange(
        self, t: int, clients: Sequence[int], common: ray.ObjectRef, mail: Mapping[int, Any]
    ) -> dict[int, Ended]:
        places = share_out(clients, self._sizes, len(self._pool.workers))
        at = {id: self._pool.workers[place] for id, place in places.items()}
        begun = []
        for worker in self._pool.workers:
            mine = [id for id in clients if at[id] is worker]
            states = [self._states.get(id, {}) for id in mine]
            begun.append(worker.begin.remote(t, mine, common, {id: mail[id] for id in mine if id in mail}, *states))
        of_worker(begun)
        order = self.setup.settings.config.order
        groups = [clients] if order == "interleaved" else [[id] for id in clients]
        # As they come: every client has a conversation of its own with the S-server. Else they take turns.
        with ThreadPoolExecutor(len(groups) if order == "arrival" else 1) as threads:
            list(threads.map(lambda group: self._converse(group, at), groups))
        references = {id: at[id].outcome.options(num_returns=2).remote(id) for id in clients}
        updates = of_worker([update for update, _ in references.values()])
        return {id: (update, state) for (id, (_, state)), update in zip(references.items(), updates, strict=True)}

    def _converse(self, clients: Sequence[int], at: Mapping[int, ActorHandle]) -> None:
        """Run these clients together: all to their next upload, then the S-server's replies, and repeat."""
        workers = [worker for worker in self._pool.workers if any(at[id] is worker for id in clients)]
        replies: Sequence[Any] = [{id: None for id in clients if at[id] is worker} for worker in workers]
        running = set(clients)
        while running:
            said = [
                worker.advance.options(num_returns=2).remote(reply)
                for worker, reply in zip(workers, replies, strict=True)
            ]
            for ended in of_worker([ended for ended, _ in said]):
                for id in self._failures.note(ended):
                    self._call("ask", "drop", id)
                running -= set(ended)
            if running:
                assert self._server is not None, "an algorithm without an S-server must not upload"
                exchange = self._server.exchange.options(num_returns=1 + len(workers))
                fine, *replies = exchange.remote(clients, *(uploads for _, uploads in said))
                self._answer(fine)

    def remarks(self) -> dict[str, Any]:
        """Clients that failed in this round, and why."""
        return self._failures.told()

    def evaluate(self, parts: Parts) -> dict[str, Any]:
        """The test set's batches are shared out among the workers."""
        return evaluate(self.setup.settings, parts, self._pool.spread)

    def local_tensors(self) -> dict[int, Parts]:
        """By client, in order: the tensors that it keeps for itself."""
        return local_tensors(self.setup, self._client_states())

    # State

    def state(self) -> Tensors:
        """`clients/ID/…` and `server/…`."""
        return join_states(self._client_states(), self.server.state())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.restore(state, {})

    def checkpoint(self) -> tuple[Tensors, Named]:
        """The states that fit into memory and the S-server's, and the files of the others.

        States come from the object store one by one, those of clients that have run since the last checkpoint.
        """
        for id in sorted(self._changed):
            self._store.put(id, to_device(fetch(self._states[id]), self.setup.settings.device))
        self._changed.clear()
        named = self._store.seal()
        return join_states(self._store.in_memory(), self.server.state()), named

    def restore(self, state: Mapping[str, Tensor], named: Any) -> None:
        """Restore what `checkpoint` returned."""
        clients, server = part_states(state)
        self._store.load(clients, named)
        self._states = {id: ray.put(tensors) for id, tensors in self._store.items()}
        self._changed.clear()
        self.server.load_state(server)

    def _client_states(self) -> dict[int, Tensors]:
        device = self.setup.settings.device
        return {id: to_device(fetch(state), device) for id, state in self._states.items()}

    def close(self) -> None:
        """End the actors and the cluster, if they were started for this run; a second time it does nothing.

        By then Ray may have been started anew, and knows nothing of the actors of before.
        """
        crew, self._own_crew = self._own_crew, None
        cluster, self._own_cluster = self._own_cluster, False
        self._store.close()
        if crew is not None:
            crew.dismiss()
        if cluster:
            ray.shutdown()

    # The S-server

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the S-server's actor; None if there is no S-server."""
        if self._server is None:
            return None
        return self._answer(getattr(self._server, method).remote(*arguments, **options))

    def _answer(self, reference: ray.ObjectRef) -> Any:
        try:
            return to_device(fetch(reference), self.setup.settings.device)
        except LOSSES as error:
            raise LostError(f"The S-server was lost: {error}") from error


def of_worker(references: Sequence[ray.ObjectRef]) -> list[Any]:
    """The results of workers, when all have answered."""
    ray.wait(list(references), num_returns=len(references))
    try:
        return [fetch(reference) for reference in references]
    except DEATHS as error:
        raise WorkerDiedError(str(error)) from error


def to_device_of(setup: Setup, update: Update) -> Update:
    """An update on the driver's device."""
    parts, extra = to_device((update.parts, update.extra), setup.settings.device)
    return replace(update, parts=parts, extra=extra)


def longest_first(clients: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The clients in descending order of their examples, so that no long round starts last."""
    return sorted(clients, key=lambda id: (-sizes[id], id))


def share_out(clients: Sequence[int], sizes: Sequence[int], workers: int) -> dict[int, int]:
    """Assign a worker to every client: the longest first, each to the worker with the least work."""
    load, places = [0] * workers, {}
    for id in longest_first(clients, sizes):
        places[id] = load.index(min(load))
        load[places[id]] += sizes[id]
    return places

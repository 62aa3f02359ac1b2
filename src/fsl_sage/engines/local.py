"""The default engine: one process. Clients that don't wait train side by side in threads, each with its own modules,
and the S-server learns from what they have uploaded meanwhile.

The numbers do not depend on the number of workers: a client's round depends on nothing but its state and what came
down, the S-server takes uploads in a fixed order, and sums run in client order.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from fsl_sage.activity import now
from fsl_sage.devices import all_on
from fsl_sage.engines.apart import Turns, folds_copies, most_copies
from fsl_sage.engines.base import ClientError, Delivery, Engine, Failures, Outcome, Replies, Setup, survivors
from fsl_sage.engines.desk import Desk
from fsl_sage.engines.intake import Intake, learn_from
from fsl_sage.engines.server import host_server, join_states, local_tensors, part_states
from fsl_sage.engines.threads import Threads
from fsl_sage.engines.worker import Conversation, Place, Worker, copied, evaluate
from fsl_sage.records.client_store import ClientStore, Named
from fsl_sage.records.resting import RestingPlace
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.roles.group import schedule_of
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.units import MIB
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import PAUSE, Message, Tensors

Outcomes = dict[int, Outcome | ClientError]
Word = TypeVar("Word", Message | Outcome | ClientError, Outcome | ClientError)


class Arrivals:
    """Updates that threads bring in any order and that are taken in the order of the clients."""

    def __init__(self, clients: Sequence[int], take: Callable[[Update], Update]) -> None:
        self.taken: list[Update] = []
        self._order = deque(clients)
        self._take = take
        self._waiting: dict[int, Update] = {}
        self._lock = threading.Lock()

    def bring(self, update: Update) -> None:
        """An update has come. It is taken if those before it have been."""
        with self._lock:
            self._waiting[update.client] = update
            while self._order and self._order[0] in self._waiting:
                self.taken.append(self._take(self._waiting.pop(self._order.popleft())))


class LocalEngine(Engine):
    """Threads in one process."""

    takes_in_order = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._threads = Threads(setup)
        self.clients = self._clients = ClientStore(setup.settings.config.client_memory_mib * MIB, setup.settings.device)
        self._arrivals: Arrivals | None = None
        self._failures = Failures(setup.settings.config.on_client_failure)
        self.server = self._server = host_server(setup, self._threads.spread)

    # Rounds

    def train(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> list[Update]:
        """Clients that wait go step by step together; the others run their whole round in parallel."""
        self._server.begin(t)
        self._clients.share(tensors for mail in delivery.mail.values() for tensors in mail.values())
        self._arrivals = Arrivals(clients, self.on_update) if self.on_update is not None else None
        outcomes: Outcomes = {}
        if not self.setup.algorithm.waits_in(t):
            outcomes = self._run_in_parallel(t, clients, delivery, link)
        elif folds_copies(self.setup, clients):
            outcomes = self._run_apart(t, clients, delivery, link)
        else:
            one_by_one = self.setup.algorithm.answers_one_by_one
            play = self._run_one_by_one if one_by_one else self._run_in_step
            blocked = self.setup.settings.config.order == "blocked"
            for party in [[client] for client in clients] if blocked else [clients]:
                outcomes |= play(t, party, delivery, link)
        if self._arrivals is not None:
            return self._arrivals.taken
        return [outcome.update for outcome in survivors(outcomes).values()]

    def _run_in_parallel(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> Outcomes:
        intake = Intake.in_order(self.setup.settings.config.order, clients)
        begun = itertools.count(1)

        def whole_rounds(group: Sequence[int]) -> Outcomes:
            try:
                with self._threads.free_worker() as worker:
                    now(f"training client {[next(begun) for _ in group][-1]} of {len(clients)}")
                    played = self._whole_rounds(worker, t, group, delivery, intake)
                    return {id: self._stored(id, outcome) for id, outcome in played.items()}
            finally:
                for id in group:
                    intake.close(id)

        groups = self._groups(clients, delivery)
        rounds: Iterable[Outcomes]
        if len(self._threads.workers) == 1:  # nothing else runs beside the client that is measured
            rounds = []
            for group in groups:
                rounds += self._threads.map(whole_rounds, [group])
                learn_from(intake.ready(), self._server, link)
        else:
            rounds = self._threads.map(whole_rounds, groups)
            learn_from(intake, self._server, link)
        by_client = {id: outcome for group in rounds for id, outcome in group.items()}
        outcomes = {id: by_client[id] for id in clients}
        for id in self._failures.note(outcomes):
            self._server.drop(id)
        return outcomes

    def _whole_rounds(
        self, worker: Worker, t: int, group: Sequence[int], delivery: Delivery, intake: Intake
    ) -> Outcomes:
        """The rounds of clients that train as one, or of one client; uploads go to the intake."""
        states = {id: self._state(id) for id in group}
        if len(group) > 1:
            return worker.rounds_as_one(t, states, delivery, intake.put)
        return {id: worker.whole_round(t, id, states.pop(id), delivery, partial(intake.put, id)) for id in group}

    def _groups(self, clients: Sequence[int], delivery: Delivery) -> list[list[int]]:
        """The clients that train as one, by --clients-at-once; each alone by default, and the one that is measured."""
        config, examples = self.setup.settings.config, self.setup.examples
        if config.clients_at_once == 1:
            return [[id] for id in clients]
        alike: dict[Any, list[int]] = {}
        for id in clients:
            sizes = local_batch_sizes(len(examples[id]), config)
            key = "measured" if id == delivery.measured else schedule_of(sizes, self._clients.get(id, {}))
            alike.setdefault(key, []).append(id)
        at_once = config.clients_at_once
        return [own[start : start + at_once] for own in alike.values() for start in range(0, len(own), at_once)]

    def _run_apart(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> Outcomes:
        """Each worker plays a client's round to its end, then that of the next: see `apart`."""
        most = most_copies(self.setup, len(self._threads.workers))
        turns = Turns(clients, most, partial(self._server.fold_copy, cohort=clients))
        begun = itertools.count(1)

        def whole_round(id: int) -> Outcome | ClientError:
            with turns.giving_up(), self._threads.free_worker() as worker:
                turns.wait_for_room(id)
                now(f"training client {next(begun)} of {len(clients)}")
                conversation = worker.converse(t, id, self._state(id), delivery)
                word = conversation(None)
                while isinstance(word, Message):
                    with turns.at_server(id):
                        reply = self._server.exchange({id: word}, link)[id]
                    word = conversation(reply)
                self._failures.note({id: word})
                outcome = self._stored(id, word)
                turns.end(id)
                return outcome

        return dict(zip(clients, self._threads.map(whole_round, clients), strict=True))

    def _run_in_step(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> Outcomes:
        """Run every client to its next upload, take the S-server's replies, and repeat."""
        shares = self._shares(clients)
        conversations = self._conversations(t, shares, delivery)
        replies: Replies = dict.fromkeys(clients)
        outcomes: Outcomes = {}
        steps = itertools.count(1)
        while replies:
            now(f"training {len(replies)} clients, exchange {next(steps)}")

            def on(share: Sequence[int], replies: Replies = replies) -> dict[int, Message | Outcome | ClientError]:
                return {id: self._stored(id, conversations[id](replies[id])) for id in share if id in replies}

            said = {id: word for share in self._threads.map(on, shares) for id, word in share.items()}
            ended = {id: word for id, word in said.items() if not isinstance(word, Message)}
            for id in self._failures.note(ended):
                self._server.drop(id)
            outcomes |= ended
            uploads = {id: word for id in clients if isinstance(word := said.get(id), Message)}
            replies = self._server.exchange(uploads, link)
        return {id: outcomes[id] for id in clients}

    def _run_one_by_one(self, t: int, clients: Sequence[int], delivery: Delivery, link: Link) -> Outcomes:
        """The same where a reply depends on no other upload of its step: a client ends its step before the next one.

        So each worker has one graph open, not one for each of its clients, and the S-server learns while clients
        compute. Step k of every client still comes before step k + 1 of any, in the same order at the S-server.
        """
        shares = self._shares(clients)
        one_each = len(clients) <= len(shares)  # nobody rests while a worker is with another client
        rests = RestingPlace.in_memory() if one_each else self._clients.resting_place()
        conversations = self._conversations(t, shares, delivery, rests)
        outcomes: Outcomes = {}
        steps = itertools.count(1)
        while running := [id for id in clients if id not in outcomes]:
            now(f"training {len(running)} clients, exchange {next(steps)}")
            desk = Desk(running)
            at_work = [{id: conversations[id] for id in share if id not in outcomes} for share in shares]
            with desk.giving_up():  # also if an interrupt comes just when the clients have begun
                ends = self._threads.map(partial(self._take_steps, desk), at_work)
                for id in running:
                    desk.answer(id, self._reply(id, desk.heard(id), link))
            ended = {id: end for share in ends for id, end in share.items()}
            for id in self._failures.note(ended):
                self._server.drop(id)
            outcomes |= ended
        return {id: outcomes[id] for id in clients}

    def _reply(self, id: int, word: Message | Outcome | ClientError, link: Link) -> Message | None:
        """The S-server's reply to an upload; to a client at its end there is none."""
        if isinstance(word, Message):
            return self._server.exchange({id: word}, link)[id]
        self._failures.note({id: word})
        return None

    def _take_steps(self, desk: Desk, conversations: Mapping[int, Conversation]) -> Outcomes:
        """One step of each of a worker's clients; returns those whose rounds have ended."""
        with desk.giving_up():
            ends = {id: self._step(id, conversation, desk) for id, conversation in conversations.items()}
        return {id: end for id, end in ends.items() if end is not None}

    def _step(self, id: int, conversation: Conversation, desk: Desk) -> Outcome | ClientError | None:
        """One step of a client that pauses; returns how its round has ended, if it has."""
        word = conversation(None)
        desk.say(id, word)
        if isinstance(word, Message):
            word = conversation(desk.reply_to(id))
        if word is PAUSE:
            return None
        assert not isinstance(word, Message), "an algorithm that answers one by one has one upload in a step"
        return self._stored(id, word)

    def _shares(self, clients: Sequence[int]) -> list[Sequence[int]]:
        """The clients of each worker. A client stays with it, in whose modules its graph is recorded."""
        count = len(self._threads.workers)
        return [clients[place::count] for place in range(count)]

    def _conversations(
        self, t: int, shares: Sequence[Sequence[int]], delivery: Delivery, rests: Place | None = None
    ) -> dict[int, Conversation]:
        return {
            id: worker.converse(t, id, self._state(id), delivery, rests)
            for worker, share in zip(self._threads.workers, shares, strict=True)
            for id in share
        }

    def _state(self, id: int) -> Tensors:
        """A client's state. It is trained in place, unless a client may fail: it then returns with a copy."""
        state = self._clients.get(id, {})
        return copied(state) if self.setup.settings.config.on_client_failure == "drop" else state

    def _stored(self, id: int, word: Word) -> Word:
        """What a client has said. At the end of its round the thread that ran it stores its state, and lets it go."""
        if not isinstance(word, Outcome):
            return word
        self._clients.put(id, word.state)
        if self._arrivals is None:
            return replace(word, state={})
        self._arrivals.bring(word.update)
        return Outcome(Update(id, {}), {})

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
        self.restore(state, {})

    def checkpoint(self) -> tuple[Tensors, Named]:
        """The states in memory and the S-server's, and the files of the others."""
        named = self._clients.seal()
        return join_states(self._clients.in_memory(), self._server.state()), named

    def restore(self, state: Mapping[str, Tensor], named: Any) -> None:
        """Restore what `checkpoint` returned."""
        clients, server = part_states(all_on(state, self.setup.settings.device))
        self._clients.load(clients, named)
        self._server.load_state(server)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.close()
        self._clients.close()

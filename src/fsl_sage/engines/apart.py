"""Clients that wait but have nothing to do with each other: each takes its round by itself, from start to end.

In SplitFed-MS each client has a server-side model of its own. All models of a round, with their optimizers, can be far
more than the memory: 126 MB for each ResNet-18 client. So a client that has ended its round has its model folded into
the average, and is followed by another. There are as many models as workers then, and those of clients that came to
their end before one with a smaller number, since the average is summed in the order of the clients. No worker waits for
another's client at any step. It changes no bit of a run.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fsl_sage.engines.base import Setup
from fsl_sage.optimizers import state_shapes
from fsl_sage.units import MIB
from fsl_sage.wire.message import nbytes


def folds_copies(setup: Setup, clients: Sequence[int]) -> bool:
    """Whether the clients' own server-side models can be averaged as they come.

    So it is with the plain mean, summed in the order of the clients, if every client will come to its end.
    """
    config = setup.settings.config
    plain = config.averaging.rule == "mean" and config.on_client_failure == "stop"
    return setup.algorithm.clients_are_apart and plain and list(clients) == sorted(clients)


def most_copies(setup: Setup, workers: int) -> int:
    """How many clients' server-side models fit into --client-memory-mib; at least one for each worker."""
    return max(workers, setup.settings.config.client_memory_mib * MIB // _bytes_of_one(setup))


def _bytes_of_one(setup: Setup) -> int:
    """What is held for a client during its round: weights, and what optimizers remember, at both ends."""
    optimizer = setup.settings.config.optimizer
    parts = [setup.initial[part] for part in {*setup.algorithm.holds, "server"}]
    return sum(nbytes(own) + nbytes(state_shapes(optimizer.name, own, optimizer.momentum)) for own in parts)


class Turns:
    """What clients of one round, each on a thread of its own, have to wait for.

    Threads must take the clients up in their order: the one that others wait for is then always at work.
    """

    def __init__(self, clients: Sequence[int], most: int, fold: Callable[[int], None]) -> None:
        """Begin a round.

        Args:
            clients: Those of the round, in their order.
            most: How many may have begun and not be folded.
            fold: Called for each client once it has ended, in their order.
        """
        self._clients = clients
        self._places = {id: place for place, id in enumerate(clients)}
        self._most = most
        self._fold = fold
        self._ended: set[int] = set()
        self._folded = 0
        self._is_open = False
        """Whether the S-server has answered the first client, or will not: what its first step takes is measured."""
        self._error: BaseException | None = None
        self._change = threading.Condition()

    def wait_for_room(self, id: int) -> None:
        """Wait until there is room for what the S-server keeps of this client."""
        with self._change:
            self._wait(lambda: self._places[id] < self._folded + self._most)

    @contextmanager
    def at_server(self, id: int) -> Iterator[None]:
        """The S-server serves one client at a time, and in a round the first client first."""
        with self._change:
            self._wait(lambda: self._is_open or self._places[id] == 0)
            yield
            self._open()

    def end(self, id: int) -> None:
        """A client has come to the end of its round. It is folded when those before it are."""
        with self._change:
            self._ended.add(id)
            while self._folded < len(self._clients) and self._clients[self._folded] in self._ended:
                self._fold(self._clients[self._folded])
                self._folded += 1
            self._open()

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """While a client is at work: if it fails, no other waits for it for ever."""
        try:
            yield
        except BaseException as error:
            with self._change:
                self._error = self._error or error
                self._change.notify_all()
            raise

    def _open(self) -> None:
        self._is_open = True
        self._change.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        self._change.wait_for(lambda: self._error is not None or until())
        if self._error is not None:
            raise self._error

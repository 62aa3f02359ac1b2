"""Where uploads wait for their turn at the S-server."""

import io
import math
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import torch

from fsl_sage.engines.base import Uploads
from fsl_sage.engines.server import HostedServer, NoServer
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import Message

Key = tuple[int, int]
"""(client, step)."""


class Intake:
    """The uploads of one round, each once, in the order that the run asks for; some threads put and another takes.

    A client's uploads come in the order of their steps. One that comes before its turn is held back, on disk if those
    held already take more than `limit` bytes. A repeat, from a client that was run again, is dropped.
    """

    def __init__(self, order: str, clients: Sequence[int], limit: float = math.inf) -> None:
        self.dropped = 0
        self._order = order
        self._clients = clients
        self._limit = limit
        self._in_memory = 0
        self._held: dict[Key, Message | int] = {}
        """The upload, or its place in the spill file."""
        self._seen: set[Key] = set()
        self._reached: dict[int, float] = dict.fromkeys(clients, -1)
        """By client the step of its last upload; infinite when there are no more to come."""
        self._spill = _Spill()
        self._change = threading.Condition()

    @classmethod
    def in_order(cls, order: str, clients: Sequence[int]) -> "Intake":
        """An intake for clients whose arrival means nothing, such as threads: `arrival` becomes interleaved."""
        return cls("interleaved" if order == "arrival" else order, clients)

    def put(self, client: int, upload: Message) -> None:
        """An upload has come."""
        step = int(upload.values["step"])
        with self._change:
            if client not in self._reached or (client, step) in self._seen:
                self.dropped += 1
                return
            self._seen.add((client, step))
            size = sum(upload.sizes().values())
            if self._in_memory + size > self._limit:
                self._held[client, step] = self._spill.write(upload)
            else:
                self._in_memory += size
                self._held[client, step] = upload
            self._reached[client] = max(self._reached[client], step)
            self._change.notify_all()

    def close(self, client: int) -> None:
        """No more uploads will come from this client."""
        with self._change:
            if client in self._reached:
                self._reached[client] = math.inf
                self._change.notify_all()

    def __iter__(self) -> Iterator[Uploads]:
        """Yield the uploads that the S-server takes together, and wait for those that have not come yet."""
        while uploads := self._take():
            yield uploads

    def ready(self) -> Iterator[Uploads]:
        """Yield those whose turn has come, and wait for no others."""
        while uploads := self._take(waits=False):
            yield uploads

    def _take(self, *, waits: bool = True) -> Uploads:
        with self._change:
            while (turn := self._turn()) is None:
                if not waits:
                    return {}
                self._change.wait()
            return {client: self._release((client, step)) for client, step in turn}

    def _release(self, key: Key) -> Message:
        upload = self._held.pop(key)
        if isinstance(upload, int):
            return self._spill.read(upload)
        self._in_memory -= sum(upload.sizes().values())
        return upload

    def _turn(self) -> list[Key] | None:
        """The uploads whose turn it is: none when the round is over; None while that is not known."""
        over = all(math.isinf(step) for step in self._reached.values())
        if not self._held and over:
            return []
        if self._order == "arrival":
            return list(self._held)[:1] or None
        if self._order == "blocked":
            return self._turn_of_first_client()
        if not self._held:
            return None
        step = min(step for _, step in self._held)
        if min(self._reached.values()) < step:
            return None  # a client may still send an upload of this step, or of one before
        return [(client, step) for client in self._clients if (client, step) in self._held]

    def _turn_of_first_client(self) -> list[Key] | None:
        for client in self._clients:
            steps = [step for id, step in self._held if id == client]
            if steps:
                return [(client, min(steps))]
            if not math.isinf(self._reached[client]):
                return None
        return []


def learn_from(taken: Iterable[Uploads], server: HostedServer | NoServer, link: Link) -> None:
    """Let the S-server take uploads: those of an intake, all of the round, while clients may still be training."""
    for uploads in taken:
        server.exchange(uploads, link)


class _Spill:
    """A file without a name, so that it disappears with its process. It exists only while something is in it."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._unread = 0

    def write(self, upload: Message) -> int:
        """Write an upload; returns its place in the file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="fsl-sage-")  # noqa: SIM115
        content = io.BytesIO()
        torch.save({"parts": dict(upload.parts), "values": dict(upload.values)}, content)
        place = self._file.seek(0, io.SEEK_END)
        self._file.write(len(content.getbuffer()).to_bytes(8, "little"))
        self._file.write(content.getbuffer())
        self._unread += 1
        return place

    def read(self, place: int) -> Message:
        """Read an upload back, once."""
        assert self._file is not None
        self._file.seek(place)
        size = int.from_bytes(self._file.read(8), "little")
        content = torch.load(io.BytesIO(self._file.read(size)), weights_only=True)
        self._unread -= 1
        if not self._unread:
            self._file.close()
            self._file = None
        return Message(content["parts"], content["values"])

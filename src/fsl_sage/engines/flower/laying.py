"""Sends the foundation of a client's parts to its site before its first round, where it is too large for a message.

The server offers the foundation, and the site answers which chunks of which weights are missing. None are, if they are
in its files or came with an earlier run. The server sends a few chunks in each message, so that neither Flower nor the
site's process ever has more in memory. A lost message is sent again after a new offer. Chunks that arrived are kept.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fsl_sage.engines.flower.contents import ABOUT, FOUNDATION, OFFER, TENSORS, as_record
from fsl_sage.engines.flower.courier import Courier, Refusal
from fsl_sage.engines.flower.foundation import Foundation, as_bytes
from fsl_sage.engines.flower.weight_store import CHUNK, WEIGHTS, chunks_of
from fsl_sage.wire.message import Tensors

IN_A_MESSAGE = 2**25
"""Bytes of chunks. Flower starts a process at the site for every message, which takes about four times as much."""
TRIES = 5
"""A site that makes no progress after so many offers is left out of the round."""
PATIENCE = 300.0
"""Seconds after which a message counts as lost: a node that loses one with its connection does not say so. Chunks that
arrive later are still kept at the site."""
PAUSE = 3.0
"""Seconds before a site that did not answer is asked again: it may be reconnecting."""

Chunk = tuple[str, int]
"""The SHA-256 of a weight, and the number of one of its chunks."""


class Laying:
    """Sends the foundation, and knows which sites have it."""

    def __init__(self, foundation: Foundation, large: Tensors, run: str, tell: Callable[[str], None]) -> None:
        self.block = foundation.pack()
        self._large = large
        self._run = run
        self._tell = tell
        self._laid: set[int] = set()

    @property
    def comes_first(self) -> bool:
        """Whether the foundation is sent before a client's first round, and not with it."""
        return bool(self._large)

    def forget(self, client: int) -> None:
        """Offer the foundation to a client once more: its site may have lost it."""
        self._laid.discard(client)

    def send(self, nodes: Mapping[int, int], courier: Courier, timeout: float) -> dict[int, str]:
        """Send the foundation to the nodes of these clients that do not have it.

        Returns by client the reason why one did not get it.
        """
        if not self.comes_first:
            return {}
        timeout = min(timeout, PATIENCE)
        waiting = {client: node for client, node in nodes.items() if client not in self._laid}
        least = dict.fromkeys(waiting, sum(chunks_of(tensor.nbytes) for tensor in self._large.values()) + 1)
        tries = dict.fromkeys(waiting, 0)
        failed: dict[int, str] = {}
        while waiting:
            offers = {client: self._offer(client, node, timeout) for client, node in waiting.items()}
            lacks: dict[int, list[Chunk]] = {}
            for client, answer in courier.exchange(offers, timeout).items():
                chunks = None if isinstance(answer, str) else self._lacking(answer)
                if chunks == []:
                    self._laid.add(client)
                    del waiting[client]
                    continue
                progress = chunks is not None and len(chunks) < least[client]
                tries[client] = 0 if progress else tries[client] + 1
                if isinstance(answer, Refusal) or tries[client] >= TRIES:
                    failed[client] = answer if isinstance(answer, str) else "the weights that it starts from are lost"
                    del waiting[client]
                elif chunks is not None:
                    least[client] = min(least[client], len(chunks))
                    lacks[client] = chunks
            self._send_chunks(lacks, waiting, courier, timeout)
            if waiting and not lacks:
                time.sleep(PAUSE)
        return failed

    def _offer(self, client: int, node: int, timeout: float) -> Message:
        about = ConfigRecord({"run": self._run, "client": client})
        content = RecordDict({ABOUT: about, FOUNDATION: as_record(self.block)})
        return Message(content, node, f"query.{OFFER}", ttl=timeout)

    def _lacking(self, answer: Message) -> list[Chunk]:
        """The chunks that a site says are missing. Those that do not exist are left out."""
        about = answer.content.config_records.get(ABOUT, ConfigRecord())
        said = about.get("lacks", [])
        chunks = [str(word).partition(".") for word in (said if isinstance(said, list) else [])]
        found = [
            (sha256, int(number))
            for sha256, _, number in chunks
            if sha256 in self._large
            and number.isdecimal()
            and len(number) < 9
            and int(number) < chunks_of(self._large[sha256].nbytes)
        ]
        return list(dict.fromkeys(found))

    def _send_chunks(
        self, lacks: Mapping[int, Sequence[Chunk]], nodes: Mapping[int, int], courier: Courier, timeout: float
    ) -> None:
        """Send chunks to all sites in parallel, one message at a time to each.

        A site that fails to take a message is asked again which chunks are missing.
        """
        queues = {client: list(self._in_messages(chunks)) for client, chunks in lacks.items()}
        if queues:
            most = max(sum(map(self._size, chunks)) for chunks in lacks.values())
            self._tell(f"Sending frozen weights to {len(queues)} sites, {most / 1e6:,.0f} MB each at most")
        while queues:
            messages = {client: self._chunks(nodes[client], queue.pop(0), timeout) for client, queue in queues.items()}
            answers = courier.exchange(messages, timeout)
            queues = {c: queue for c, queue in queues.items() if queue and not isinstance(answers[c], str)}

    def _in_messages(self, chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
        """Put chunks together into messages of at most IN_A_MESSAGE bytes."""
        message: list[Chunk] = []
        for chunk in chunks:
            if message and sum(map(self._size, message)) + self._size(chunk) > IN_A_MESSAGE:
                yield message
                message = []
            message.append(chunk)
        if message:
            yield message

    def _size(self, chunk: Chunk) -> int:
        sha256, number = chunk
        return min(CHUNK, self._large[sha256].nbytes - number * CHUNK)

    def _chunks(self, node: int, chunks: Sequence[Chunk], timeout: float) -> Message:
        arrays, sizes = {}, []
        for sha256, number in chunks:
            content = bytes(as_bytes(self._large[sha256])[number * CHUNK : (number + 1) * CHUNK])
            arrays[f"{sha256}.{number}"] = Array("uint8", (len(content),), "bytes", content)
            sizes.append(self._large[sha256].nbytes)
        content_records = RecordDict({ABOUT: ConfigRecord({"sizes": sizes}), TENSORS: ArrayRecord(arrays)})
        return Message(content_records, node, f"query.{WEIGHTS}", ttl=timeout)

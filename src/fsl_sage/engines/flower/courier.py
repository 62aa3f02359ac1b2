"""Carries messages to nodes and brings back the replies, or the reason why there is none."""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

POLL = 0.5
"""Seconds between two checks for replies, at least."""
LONGEST_POLL = 5.0
"""Seconds between two checks for replies, at most: see `pause_after`."""
PATIENCE = 300.0
"""Seconds for which a SuperLink that does not answer is asked again: its machine may be busy."""
PAUSE = 2.0
"""Seconds between two such tries."""

Answer = TypeVar("Answer")


class Refusal(str):
    """A site's own reason for refusing a message. Other reasons come from Flower and may be temporary."""


class Courier:
    """Flower's grid, with a reason for every reply that does not come. The grid alone just returns fewer replies."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> dict[int, NodeInfo]:
        """The nodes that are connected, by id."""
        return {node.node_id: node for node in _patiently(lambda: list(self._grid.get_nodes()))}

    def send(self, messages: Mapping[int, Message]) -> dict[str, int]:
        """Send messages, given by key; returns the keys by the ids that Flower gave the messages."""
        ids = _patiently(lambda: list(self._grid.push_messages(list(messages.values())))) if messages else []
        return {id: key for id, key in zip(ids, messages, strict=True) if id}

    def collect(self, ids: Iterable[str]) -> dict[str, Message | str]:
        """The replies that have come. By the id of the message: the reply, or the reason why there will be none."""
        found: dict[str, Message | str] = {}
        for id in ids:
            # One by one, so that a reply that cannot be read spoils no other.
            try:
                replies = _patiently(partial(self._pull, id))
            except httpx.HTTPError:
                raise
            except Exception as error:
                found[id] = f"its reply cannot be read ({type(error).__name__})"
                continue
            for reply in replies:
                found[id] = _reason(reply) if reply.has_error() else reply
        return found

    def _pull(self, id: str) -> list[Message]:
        return list(self._grid.pull_messages([id]))

    def exchange(self, messages: Mapping[int, Message], timeout: float) -> dict[int, Message | str]:
        """Send messages, given by key, and wait at most `timeout` seconds.

        Returns for every key the reply, or the reason why there is none.
        """
        arrival = {id: node.last_activated_at for id, node in self.nodes().items()}
        pending = self.send(messages)
        start = time.monotonic()
        deadline = start + timeout
        answers: dict[int, Message | str] = {}
        while pending and time.monotonic() < deadline:
            for id, answer in self.collect(pending).items():
                answers[pending.pop(id)] = answer
            for id in self._restarted(pending, messages, arrival):
                answers[pending.pop(id)] = "its node was restarted during the round"
            if pending:
                time.sleep(min(pause_after(time.monotonic() - start), max(0.0, deadline - time.monotonic())))
        unanswered = dict.fromkeys(messages, "the SuperLink did not take its message")
        return {**unanswered, **dict.fromkeys(pending.values(), f"no reply within {timeout:g} s"), **answers}

    def _restarted(
        self, pending: Mapping[str, int], messages: Mapping[int, Message], arrival: Mapping[int, str]
    ) -> list[str]:
        """The ids of messages whose nodes have restarted since: these messages are lost."""
        nodes = self.nodes() if pending else {}
        receivers = {id: nodes.get(messages[key].metadata.dst_node_id) for id, key in pending.items()}
        return [id for id, node in receivers.items() if node and node.last_activated_at != arrival.get(node.node_id)]


def pause_after(waited: float) -> float:
    """Seconds until the next check for replies: a twentieth of the time waited, within bounds. A check takes work."""
    return min(max(POLL, waited / 20), LONGEST_POLL)


def _patiently(ask: Callable[[], Answer]) -> Answer:
    """Ask the SuperLink, and again for a while if the connection fails. A run must not end for that."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE)


def _reason(reply: Message) -> str:
    """The text of an error reply, without what Flower puts around an exception."""
    reason = reply.error.reason or f"Flower's error {reply.error.code}"
    # A peer wrote it, and the expression may take time with the square of the text's length.
    raised = re.fullmatch(r"<class '.*?'>:<'(.*)'>", reason, re.DOTALL) if len(reason) < 10_000 else None
    return Refusal(printable(raised[1])) if raised else printable(reason)


def printable(text: str, longest: int = 300) -> str:
    """A peer's text for a log: in one line of at most `longest` characters, without control characters."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= longest else text[: longest - 3] + "..."

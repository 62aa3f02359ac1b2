"""A grid without a network: every message is played at once by the real ClientApp of its node."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

Reply = Callable[[int, Message, Message], Message | None]
"""Given a client, the message and its reply, what comes of the reply; None: nothing ever comes."""


@dataclass
class Node:
    """A node that is connected."""

    info: NodeInfo
    config: dict[str, Any]


@dataclass
class InProcessGrid:
    """As much of Flower's grid as the engine uses."""

    app: ClientApp
    tamper: Reply = lambda client, message, reply: reply
    nodes: dict[int, Node] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    gone: dict[int, set[int]] = field(default_factory=dict)
    """By client, the ids of nodes that a test has taken away."""

    def __post_init__(self) -> None:
        self._replies: dict[str, Message | None] = {}
        self._numbers = count()
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def join(self, client: int, data: Path, state: Path, name: str = "", **more: str) -> int:
        """A node appears, with more in its --node-config if given."""
        id = 1000 + next(self._numbers)
        info = NodeInfo(node_id=id, name=name, last_activated_at=f"time {id}")
        self.nodes[id] = Node(info, {"client": client, "data": str(data), "state": str(state), **more})
        return id

    def get_nodes(self) -> list[NodeInfo]:
        return [node.info for node in self.nodes.values()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._play(message) for message in messages]

    def _play(self, message: Message) -> str:
        id = f"message-{next(self._numbers)}"
        message.metadata.__dict__["_message_id"] = id
        self.sent.append(message)
        node = self.nodes[message.metadata.dst_node_id]
        context = Context(1, node.info.node_id, node.config, RecordDict(), {})
        try:
            reply = self.app(copy.deepcopy(message), context)  # the other end of a network has a copy
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        self._replies[id] = self.tamper(node.config["client"], message, reply)
        return id

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        return [reply for id in ids if (reply := self._replies.pop(id, None)) is not None]

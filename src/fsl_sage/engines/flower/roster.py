"""Which node is which client.

Flower's node ids are random. A key that was registered under the name `client-N` is client N and nobody else. A node
without such a name is asked for its client's number, which its --node-config gives. That holds only until a node with a
name has been seen. Where keys have names, a key without one could take the place of a client that is offline.
"""

import re
from collections.abc import Callable, Mapping

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from fsl_sage.engines.flower.contents import ABOUT, HELLO
from fsl_sage.engines.flower.courier import Courier, printable

NAME = re.compile(r"client-(\d{1,9})")
HELLO_SECONDS = 300.0
"""Seconds that a node may take to say which client it is."""


class Roster:
    """The nodes by client."""

    def __init__(self, courier: Courier, clients: int, tell: Callable[[str], None]) -> None:
        self._courier = courier
        self._clients = clients
        self._tell = tell
        self.named = False
        """Whether a node with a name has been seen in this run: from then on, one without is refused."""
        self._client_of: dict[int, int] = {}
        self._asked: dict[str, NodeInfo] = {}
        """The nodes that have been asked, by the id of the message."""
        self._refused: dict[int, str] = {}
        """By node that was refused, the time of its arrival. It is asked again after a restart."""

    def present(self) -> dict[int, int]:
        """The node of every connected client. New nodes are asked which client they are; their answers come later."""
        nodes = self._courier.nodes()
        for id, answer in self._courier.collect(self._asked).items():
            self._hear(self._asked.pop(id), answer, nodes)
        unknown = [node for id, node in nodes.items() if self._is_unknown(id, node)]
        names = {node.node_id: int(found[1]) for node in unknown if (found := NAME.fullmatch(node.name))}
        if names or self.named:
            self._insist_on_names(nodes)
        for node in unknown:
            if node.node_id in names:
                self._enter(node, names[node.node_id], nodes)
        self._ask([] if self.named else unknown)
        return {client: node for node, client in self._client_of.items() if node in nodes}

    def _insist_on_names(self, nodes: Mapping[int, NodeInfo]) -> None:
        """Refuse the nodes without a name, also those that were accepted as a client before."""
        self.named = True
        for id, node in nodes.items():
            if not NAME.fullmatch(node.name) and self._refused.get(id) != node.last_activated_at:
                self._client_of.pop(id, None)
                self._refuse(node, "other nodes are registered by name, and it is not: register it as client-N")

    def _is_unknown(self, id: int, node: NodeInfo) -> bool:
        waiting = any(id == asked.node_id for asked in self._asked.values())
        return not (id in self._client_of or waiting or self._refused.get(id) == node.last_activated_at)

    def _ask(self, nodes: list[NodeInfo]) -> None:
        hellos = {
            place: Message(RecordDict(), node.node_id, f"query.{HELLO}", ttl=HELLO_SECONDS)
            for place, node in enumerate(nodes)
        }
        self._asked |= {id: nodes[place] for id, place in self._courier.send(hellos).items()}

    def _hear(self, node: NodeInfo, answer: Message | str, nodes: Mapping[int, NodeInfo]) -> None:
        if isinstance(answer, str):
            self._refuse(node, answer)
        elif not self.named:  # otherwise it has been refused in the meantime
            about = answer.content.config_records.get(ABOUT)
            self._enter(node, about.get("client") if about else None, nodes)

    def _enter(self, node: NodeInfo, client: object, nodes: Mapping[int, NodeInfo]) -> None:
        """Accept a node as this client, unless another connected node is this client already."""
        if type(client) is not int or not 0 <= client < self._clients:
            self._refuse(node, f"there is no client {printable(str(client), 60)}, only 0 to {self._clients - 1}")
        elif not any(of == client and id in nodes for id, of in self._client_of.items()):
            self._client_of = {id: of for id, of in self._client_of.items() if of != client}
            self._client_of[node.node_id] = client
            self._tell(f"Client {client} is node {node.node_id}")
        # Otherwise it is tried again: the other node may be the same site before a restart, which Flower notices late.

    def _refuse(self, node: NodeInfo, reason: str) -> None:
        self._refused[node.node_id] = node.last_activated_at
        self._tell(f"Node {node.node_id} cannot take part: {reason}")

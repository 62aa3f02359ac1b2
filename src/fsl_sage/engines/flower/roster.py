"""Which node is which client.

Flower's node ids are random, so a node that appears is asked which client it is. With authenticated nodes an id belongs
to a registered key, and a key that was registered under the name `client-N` can be nobody but client N.
"""

import re
from collections.abc import Callable
from importlib.metadata import version

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from fsl_sage.engines.flower.client_app import HELLO
from fsl_sage.engines.flower.courier import Courier, printable
from fsl_sage.engines.flower.records import ABOUT

HELLO_SECONDS = 300.0
"""How long a node may take to say which client it is."""


class Roster:
    """The nodes that have said which client they are."""

    def __init__(self, courier: Courier, clients: int, tell: Callable[[str], None]) -> None:
        self._courier = courier
        self._clients = clients
        self._tell = tell
        self._client_of: dict[int, int] = {}
        self._asked: dict[str, NodeInfo] = {}
        """The nodes that have been asked, by the id of the message."""
        self._refused: dict[int, str] = {}
        """By node, when the one that was refused had arrived: it is asked again when it is started anew."""

    def present(self) -> dict[int, int]:
        """The node of every client that is connected. New nodes are asked who they are, without waiting for them."""
        nodes = self._courier.nodes()
        for id, answer in self._courier.collect(self._asked).items():
            self._hear(self._asked.pop(id), answer, nodes)
        self._ask([node for id, node in nodes.items() if self._is_new(id, node)])
        return {client: node for node, client in self._client_of.items() if node in nodes}

    def _is_new(self, id: int, node: NodeInfo) -> bool:
        waiting = any(id == asked.node_id for asked in self._asked.values())
        return not (id in self._client_of or waiting or self._refused.get(id) == node.last_activated_at)

    def _ask(self, nodes: list[NodeInfo]) -> None:
        hellos = {
            place: Message(RecordDict(), node.node_id, f"query.{HELLO}", ttl=HELLO_SECONDS)
            for place, node in enumerate(nodes)
        }
        self._asked |= {id: nodes[place] for id, place in self._courier.send(hellos).items()}

    def _hear(self, node: NodeInfo, answer: Message | str, nodes: dict[int, NodeInfo]) -> None:
        refusal = answer if isinstance(answer, str) else self._claim(node, answer.content, nodes)
        if refusal is not None:
            self._refused[node.node_id] = node.last_activated_at
            self._tell(f"Node {node.node_id} cannot take part: {refusal}")

    def _claim(self, node: NodeInfo, content: RecordDict, nodes: dict[int, NodeInfo]) -> str | None:
        """Enter a node as the client that it says it is, or say why not."""
        about = content.config_records.get(ABOUT) or ConfigRecord()
        client, release = about.get("client"), about.get("version")
        if not isinstance(client, int) or not 0 <= client < self._clients:
            return f"it says to be client {printable(str(client), 60)}; there are 0 to {self._clients - 1}"
        if release != version("fsl-sage"):
            return f"it runs fsl-sage {printable(str(release), 60)}, the server {version('fsl-sage')}"
        registered = re.fullmatch(r"client-(\d+)", node.name)
        if registered and int(registered[1]) != client:
            return f"it says to be client {client} but its key is registered as {node.name}"
        holder = next((id for id, of in self._client_of.items() if of == client and id in nodes), None)
        if holder is None:
            self._client_of = {id: of for id, of in self._client_of.items() if of != client}
            self._client_of[node.node_id] = client
            self._tell(f"Client {client} is node {node.node_id}")
        # Else it is asked again: the other may be the same site before a restart, which Flower notices after a minute.
        return None

"""SplitFed-SS (SplitFedv2): one server-side model for all clients."""

from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.roles.s_server import SServer
from fsl_sage.wire.message import CutGradients, Message


class SplitFedSS(SplitFed):
    """The single server-side model takes a step on every upload, in the order of arrival."""

    def on_upload(self, server: SServer, client: int, upload: Message) -> Message:
        """Learn and answer."""
        return CutGradients(server.learn(client, upload, cut_gradient=True))

"""SplitFed-MS (SplitFedv1): a server-side model for each client, averaged every round."""

from collections.abc import Iterator

from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.roles.protocols import SServerRole
from fsl_sage.wire.message import Message


class SplitFedMS(SplitFed):
    """The copies stay at the S-server, so their averaging costs no communication."""

    title = "SplitFed-MS"
    colour = "#009E73"
    own_copy = True
    own_optimizers_because = "its S-server has a model, and an optimizer of it, for each client"

    def end_of_round(self, server: SServerRole, t: int) -> Iterator[tuple[int, Message]]:
        """Average the copies; no message to anyone."""
        server.average_copies()
        return iter(())

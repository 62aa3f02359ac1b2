"""SplitFed-MS (SplitFedv1): a server-side model for each client, averaged every round."""

from collections.abc import Iterator

from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.roles.protocols import SServerRole
from fsl_sage.wire.message import Message

_APART = ("local_round", "on_upload", "on_uploads", "end_of_round", "turns")
"""Where a client's upload could meet another's, or its end another's beginning."""


class SplitFedMS(SplitFed):
    """The copies stay at the S-server, so their averaging costs no communication."""

    title = "SplitFed-MS"
    colour = "#009E73"
    own_copy = True
    own_optimizers_because = "its S-server has a model, and an optimizer of it, for each client"

    @property
    def clients_are_apart(self) -> bool:
        """Yes, unless a class that is derived from this one has another way with uploads.

        Not in a U-shape, where the S-server's first step is measured with the passes of all clients.
        """
        return not self.labels_stay and all(getattr(type(self), name) is getattr(SplitFedMS, name) for name in _APART)

    def end_of_round(self, server: SServerRole, t: int) -> Iterator[tuple[int, Message]]:
        """Average the copies; no message to anyone."""
        server.average_copies()
        return iter(())

"""Joint steps: the S-server takes one step for each local step, on the mean of all clients' losses.

This is the "synchronous SplitFed" of the literature. The reply to a client is the gradient of its own mean loss, not
divided by the number of clients. (The slices of the gradient of one mean over all clients would be 1/m of it.)
"""

from collections.abc import Mapping

from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.roles.protocols import SServerRole
from fsl_sage.wire.message import CUT_GRADIENTS, CutGradients, Message


class JointSplitFed(SplitFed):
    """SplitFed with one server-side model that takes joint steps, and an average in every round or more rarely."""

    own_copy = False
    average_every: int = 1
    """Rounds between two averages of the client parts: there is one at the end of rounds I - 1, 2 I - 1, …"""

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """One step on all uploads; in a U-shape when the gradients of the heads have come."""
        if self.labels_stay and not any(CUT_GRADIENTS in upload.parts for upload in uploads.values()):
            return super().on_uploads(server, uploads)
        return joint_step(server, uploads)

    def averaged_in(self, t: int) -> tuple[str, ...]:
        """The client parts, in every I-th round."""
        return self.averaged if (t + 1) % self.average_every == 0 else ()

    def trained_in(self, t: int) -> tuple[str, ...]:
        """The client parts, in every round; between averages each client goes on with its own."""
        return self.averaged


def refuse_other_orders(config: Config, what: str) -> None:
    """Joint steps need all clients' uploads of a local step at once."""
    if config.order != "interleaved":
        raise InputError(
            f"{what} cannot run with --order {config.order}: the S-server takes the uploads of all clients in one "
            "step. Give --order interleaved."
        )


def joint_step(server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
    """One step of the S-server on the mean of these clients' mean losses; the replies are their own cut gradients.

    In a U-shape the uploads are the gradients of the clients' heads.
    """
    share = 1 / len(uploads)
    replies: dict[int, Message | None] = {}
    for client, upload in uploads.items():
        join = server.join_backward if CUT_GRADIENTS in upload.parts else server.join
        replies[client] = CutGradients(join(client, upload, share))
    server.step(local_step_of(uploads))
    return replies


def local_step_of(uploads: Mapping[int, Message]) -> int:
    """The local step that all of these uploads are of."""
    (step,) = {int(upload.values["step"]) for upload in uploads.values()}
    return step

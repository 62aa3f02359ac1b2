"""SplitFed-SS (SplitFedv2): one server-side model for all clients."""

from collections.abc import Mapping
from dataclasses import dataclass

from fsl_sage.algorithms.joint import joint_step, refuse_other_orders
from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.config import Config
from fsl_sage.roles.protocols import SServerRole
from fsl_sage.wire.message import CUT_GRADIENTS, Message


@dataclass(frozen=True)
class SplitFedSSOptions:
    """What can be chosen."""

    joint_step: bool = False
    """Let the S-server take one step for each local step, on the mean of all clients' losses, instead of one step on
    every upload."""


class SplitFedSS(SplitFed):
    """The single server-side model takes a step on every upload, in the order of arrival, or one for all of them."""

    title = "SplitFed-SS"
    colour = "#CC79A7"
    Options = SplitFedSSOptions
    options: SplitFedSSOptions
    own_copy = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.options.joint_step:
            refuse_other_orders(config, "--joint-step")

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """With --joint-step one step on all uploads; in a U-shape when the gradients of the heads have come."""
        features_first = self.labels_stay and not any(CUT_GRADIENTS in upload.parts for upload in uploads.values())
        if not self.options.joint_step or features_first:
            return super().on_uploads(server, uploads)
        return joint_step(server, uploads)

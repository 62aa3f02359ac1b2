"""SplitFed-SS (SplitFedv2): one server-side model for all clients."""

from collections.abc import Mapping
from dataclasses import dataclass

from fsl_sage.algorithms.joint import JointSplitFed, refuse_other_orders
from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.config import Config
from fsl_sage.roles.protocols import SServerRole
from fsl_sage.wire.message import Message


@dataclass(frozen=True)
class SplitFedSSOptions:
    """What can be chosen."""

    joint_step: bool = False
    """Let the S-server take one step for each local step, on the mean of all clients' losses, instead of one step on
    every upload."""


class SplitFedSS(JointSplitFed):
    """The single server-side model takes a step on every upload, in the order of arrival, or one for all of them."""

    title = "SplitFed-SS"
    colour = "#CC79A7"
    Options = SplitFedSSOptions
    options: SplitFedSSOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.options.joint_step:
            refuse_other_orders(config, "--joint-step")

    @property
    def answers_one_by_one(self) -> bool:
        """As in SplitFed-MS, unless --joint-step."""
        return self._pauses and type(self).on_uploads is SplitFedSS.on_uploads and not self.options.joint_step

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """One by one; with --joint-step all together."""
        if self.options.joint_step:
            return super().on_uploads(server, uploads)
        return SplitFed.on_uploads(self, server, uploads)

"""A control for FSL-SAGE: what a perfect auxiliary would give, whatever it costs.

    fsl-sage run --algorithm experiments.controls:TrueGradients

If it is no more accurate than FSL-SAGE, then better estimates cannot help in that setting.
"""

from dataclasses import dataclass, field

import torch

from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.roles.protocols import SServerRole
from fsl_sage.split import detached_leaves
from fsl_sage.wire.message import CutGradients, Message


@dataclass(frozen=True)
class TrueGradientsOptions:
    """What can be chosen."""

    upload_every: int = field(default=5, metadata={"unit": "steps"})
    """The S-server learns from every q-th local step, as in FSL-SAGE."""


class TrueGradients(SplitFed):
    """FSL-SAGE with the S-server's true cut gradients in the place of estimates. The server takes no other steps."""

    title = "True gradients"
    colour = "#444444"
    Options = TrueGradientsOptions
    options: TrueGradientsOptions
    own_copy = False

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> Message:
        """Answer with the cut gradients; learn from those uploads alone that FSL-SAGE's server would get."""
        if int(upload.values["step"]) % self.options.upload_every == 0:
            return super().on_upload(server, client, upload)
        z = detached_leaves(upload.smashed)
        loss = server.task_loss(server.output(*z, leaves_trace=False), upload.target, counts=False)
        return CutGradients(z if loss.is_meta else torch.autograd.grad(loss, z))  # without data there is no graph

"""HERON-SFL (Kou et al., 2026): clients learn from two forward passes; they compute no backward pass."""

from dataclasses import dataclass

from fsl_sage.algorithms.base import LocalRound
from fsl_sage.algorithms.cse_fsl import CSEFSL, CSEFSLOptions
from fsl_sage.config import RATE, Config, check_ranges
from fsl_sage.errors import InputError
from fsl_sage.roles.protocols import ClientRole
from fsl_sage.wire.message import Smashed


@dataclass(frozen=True)
class HERONSFLOptions(CSEFSLOptions):
    """What can be chosen."""

    smoothing: float = 1e-2
    """How far the second forward pass is from the first: mu, the length of the step from theta to theta + mu u."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"smoothing": RATE})


class HERONSFL(CSEFSL):
    """CSE-FSL whose clients estimate the slope of their loss along one random direction, and step along it."""

    title = "HERON-SFL"
    colour = "#17508A"
    own_optimizers_because = "its clients have no optimizer: they move along random directions"
    without_averaging = dict.fromkeys(
        ("proximal", "control_variates"), "its clients take no gradient steps that could be corrected"
    )
    Options = HERONSFLOptions
    options: HERONSFLOptions
    uses = (
        "alignment.samples",  # by which the auxiliary's fidelity is measured
        "alignment.total_samples",
        "lora.auxiliary",
        "model.auxiliary",
        "optimizer.server_lr",
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.precision == "bf16":
            raise InputError(
                "heron-sfl cannot run with --precision bf16: it takes the difference of two losses that are nearly "
                "equal, and bfloat16 rounds it away. Give float32."
            )

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """Two forward passes a step; every q-th batch is uploaded for the server part to learn from."""
        for k, batch in enumerate(client.batches(t)):
            z, loss = client.loss(batch, "auxiliary")  # l(theta), theta = (x_c, x_a)
            if k % self.options.upload_every == 0:
                yield Smashed(z, batch.target)
            u, mu = client.direction(), self.options.smoothing
            with client.moved(u, mu):
                _, ahead = client.loss(batch, "auxiliary", leaves_trace=False)  # l(theta + mu u)
            slope = (ahead - loss) / mu
            client.move(u, -client.lr() * len(u) * slope)

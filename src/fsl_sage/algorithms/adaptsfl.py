"""AdaptSFL (Lin et al., 2024): joint steps, and averages of the client parts at intervals."""

from dataclasses import dataclass, field

from fsl_sage.algorithms.joint import JointSplitFed, refuse_other_orders
from fsl_sage.config import WHOLE, Config, check_ranges


@dataclass(frozen=True)
class AdaptSFLOptions:
    """What can be chosen."""

    average_every: int = field(default=1, metadata={"label": "averaging interval", "unit": "rounds"})
    """Average the client parts every I rounds; in between each client goes on with its own."""

    def __post_init__(self) -> None:
        check_ranges(self, {"average_every": WHOLE})


class AdaptSFL(JointSplitFed):
    """The S-server steps on all clients' activations of a local step; client parts are averaged every I rounds."""

    title = "AdaptSFL"
    colour = "#B8860B"
    without_averaging = dict.fromkeys(("control_variates",), "its clients may go several rounds without an average")
    Options = AdaptSFLOptions
    options: AdaptSFLOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        refuse_other_orders(config, "adaptsfl")
        self.average_every = self.options.average_every

"""AdaptSFL (Lin et al., 2024): joint steps, and averages of the client parts at intervals."""

from dataclasses import dataclass, field

from fsl_sage.algorithms.joint import JointSplitFed, refuse_other_orders
from fsl_sage.config import WHOLE, Config, check_ranges
from fsl_sage.errors import InputError
from fsl_sage.units import parse_amount


@dataclass(frozen=True)
class AdaptSFLOptions:
    """What can be chosen."""

    average_every: int = field(default=1, metadata={"label": "averaging interval", "unit": "rounds"})
    """Average the client parts every I rounds; in between each client goes on with its own."""
    cuts: tuple[str, ...] = ()
    """A cut for each client, in the order of the clients, instead of one for all (--model.cut)."""
    client_memories: tuple[str, ...] = ()
    """The memory that each client has for a training step, such as 50MB 2GiB: its cut is planned by that."""

    def __post_init__(self) -> None:
        check_ranges(self, {"average_every": WHOLE})


class AdaptSFL(JointSplitFed):
    """The S-server steps on all clients' activations of a local step; client parts are averaged every I rounds."""

    title = "AdaptSFL"
    colour = "#B8860B"
    without_averaging = dict.fromkeys(("control_variates",), "its clients may go several rounds without an average")
    Options = AdaptSFLOptions
    options: AdaptSFLOptions
    one_cut_because = ""
    own_optimizers_because = "its clients may go several rounds without an average, and differ in what they hold"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        refuse_other_orders(config, "adaptsfl")
        self.average_every = self.options.average_every
        self.client_cuts = self.options.cuts
        self.client_memories = tuple(parse_amount(each, "--client-memories") for each in self.options.client_memories)
        if self.client_cuts or self.client_memories:
            self._check_cuts()

    def _check_cuts(self) -> None:
        """Refuse what does not go together with a cut for each client."""
        if self.client_cuts and self.client_memories:
            raise InputError("--cuts and --client-memories both say where clients are cut: give one of them.")
        name, count = (
            ("--cuts", len(self.client_cuts)) if self.client_cuts else ("--client-memories", len(self.client_memories))
        )
        config = self.config
        if count != config.clients:
            raise InputError(f"{name} has {count} values for {config.clients} clients: give one for each.")
        if config.model.cut is not None:
            raise InputError(
                f"--model.cut {config.model.cut} is one cut for all clients, {name} one for each: give one."
            )
        if config.model.batch_norm == "local":
            raise InputError(
                f"{name} cannot run with --model.batch-norm local: statistics of the layers between the cuts would "
                "stay at some clients, and at the S-server for the others. Give average or group."
            )
        for coded in ("update", "weights"):
            if config.codec.word(coded) != "none":
                raise InputError(
                    f"{name} cannot run with --codec.{coded} {config.codec.word(coded)}: changes of weights are coded "
                    f"for clients that hold the same layers. Give --codec.{coded} none."
                )
        if config.averaging.proximal:
            raise InputError(
                f"{name} cannot run with --averaging.proximal: for some clients the layers between the cuts are "
                "trained at the S-server, where nothing pulls. Leave one of them out."
            )

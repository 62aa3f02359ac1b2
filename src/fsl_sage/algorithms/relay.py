"""What split learning in turn and CPSL have in common: x_c goes from turn to turn, over the F-server."""

from dataclasses import dataclass

from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.errors import InputError


@dataclass(frozen=True)
class RelayOptions:
    """What can be chosen of the hand-over."""

    hands_on_optimizer: bool = False
    """Hand on the state of the client part's optimizer with the client part; else it stays with each client."""


class Relay(SplitFed):
    """SplitFed-SS whose clients take turns: each starts from the x_c that the turn before it has left."""

    without_averaging = dict.fromkeys(
        ("optimizer", "lr", "momentum", "proximal", "control_variates"),
        "its clients hand the model on from turn to turn, and no round has one average",
    )
    Options = RelayOptions
    options: RelayOptions
    own_copy = False
    in_turn = True
    one_cut_because = "it hands one client part on from turn to turn"
    own_optimizers_because = "its clients take turns, and --hands-on-optimizer hands the optimizer on"

    def check(self) -> None:
        """Refuse a new optimizer in every round where its state is handed on."""
        super().check()
        if self.options.hands_on_optimizer and self.config.client_optimizer == "reset":
            raise InputError(
                "--client-optimizer reset cannot run with --hands-on-optimizer: a client would start with a new "
                "optimizer and with that of the turn before. Give one of them."
            )

    @property
    def sends_optimizers(self) -> bool:
        """The state of the client part's optimizer goes from turn to turn with x_c."""
        return self.options.hands_on_optimizer

"""What split learning in turn and CPSL have in common: x_c goes from turn to turn, over the F-server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsl_sage.algorithms.base import LocalRound
from fsl_sage.algorithms.splitfed import SplitFed
from fsl_sage.errors import InputError
from fsl_sage.roles.averaging import average
from fsl_sage.roles.protocols import ClientRole, FServerRole, Update
from fsl_sage.wire.message import OPTIMIZER_STATE, Tensors
from fsl_sage.wire.paths import below, flat


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

    def check(self) -> None:
        """Refuse a new optimizer in every round where its state is handed on."""
        super().check()
        if self.options.hands_on_optimizer and self.config.client_optimizer == "reset":
            raise InputError(
                "--client-optimizer reset cannot run with --hands-on-optimizer: a client would start with a new "
                "optimizer and with that of the turn before. Give one of them."
            )

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """The steps of one turn, with the optimizer's state of the turn before, where that is handed on."""
        handed_on = client.received_extra.get(OPTIMIZER_STATE, {})
        for part in self.averaged:
            client.set_optimizer_state(part, below(f"{part}/", handed_on))
        yield from super().local_round(client, t)

    def on_update(self, client: ClientRole, t: int) -> Mapping[str, Tensors]:
        """The optimizer's state goes up with x_c."""
        if not self.options.hands_on_optimizer:
            return {}
        state = flat({part: client.optimizer_state(part) for part in self.averaged})
        return {OPTIMIZER_STATE: state} if state else {}  # SGD without momentum remembers nothing

    def aggregate(self, f_server: FServerRole, updates: Sequence[Update]) -> dict[str, Tensors]:
        """What the turn has left, the mean where it had several clients, for the next turn."""
        updates = sorted(updates, key=lambda update: update.client)
        states = [update.extra[OPTIMIZER_STATE] for update in updates if OPTIMIZER_STATE in update.extra]
        if states:
            weights = [f_server.client_weights[update.client] for update in updates]
            f_server.sends[OPTIMIZER_STATE] = _mean_state(states, weights)
        return super().aggregate(f_server, updates)


def _mean_state(states: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The weighted mean of moments and momentum; of step counters, which have no dimension, the largest."""
    counters = {path: [state[path] for state in states] for path, tensor in states[0].items() if tensor.dim() == 0}
    return average(states, weights) | {path: torch.stack(values).amax(0) for path, values in counters.items()}

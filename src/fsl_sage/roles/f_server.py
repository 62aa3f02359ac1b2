"""The F-server: averages what the clients send."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fsl_sage.roles.averaging import average
from fsl_sage.roles.protocols import FServerRole, Update
from fsl_sage.wire.message import Tensors
from fsl_sage.wire.paths import below, flat, grouped


class FServer(FServerRole):
    """Holds the averaged weights by part."""

    def __init__(self, weights: Mapping[str, Tensors], client_weights: Sequence[float]) -> None:
        self.weights = dict(weights)
        self.client_weights = client_weights
        self.extra: Tensors = {}
        self.sends: dict[str, Tensors] = {}

    def mean(self, updates: Sequence[Update]) -> dict[str, Tensors]:
        """x_c^{t+1}, the weighted mean (Algorithm 2, line 7), part by part, in the order of the clients."""
        updates = sorted(updates, key=lambda update: update.client)
        result = {}
        for part in dict.fromkeys(part for update in updates for part in update.parts):
            holders = [update for update in updates if part in update.parts]
            weights = [self.client_weights[update.client] for update in holders]
            result[part] = average([update.parts[part] for update in holders], weights)
        return result

    def state(self) -> Tensors:
        """A flat dict for a checkpoint."""
        return flat(self.weights, "weights/") | flat({"extra": self.extra}) | flat(self.sends, "sends/")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left."""
        self.weights = grouped(below("weights/", state))
        self.extra = below("extra/", state)
        self.sends = grouped(below("sends/", state))


def client_weights(weighting: str, examples: Sequence[int]) -> list[float]:
    """How much each client counts in an average."""
    return [float(count) if weighting == "examples" else 1.0 for count in examples]

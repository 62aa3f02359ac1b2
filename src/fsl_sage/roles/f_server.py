"""The F-server: averages what the clients send."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fsl_sage.roles.averaging import average
from fsl_sage.wire.message import Tensors


@dataclass(frozen=True)
class Update:
    """What a client brings to the F-server at the end of its local round."""

    client: int
    parts: Mapping[str, Tensors]
    """The trained weights by part."""
    losses: Mapping[str, float]
    """Mean training losses of the round at this client, for the metrics."""


class FServer:
    """Holds the averaged weights by part."""

    def __init__(self, weights: Mapping[str, Tensors], client_weights: Sequence[float]) -> None:
        self.weights = dict(weights)
        self.client_weights = client_weights
        """How much each client counts: its number of examples, or 1."""
        self.extra: Tensors = {}
        """What an algorithm's `aggregate` keeps from round to round (a server optimizer's state, say)."""

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
        state = {f"weights/{part}/{name}": x for part, tensors in self.weights.items() for name, x in tensors.items()}
        return state | {f"extra/{name}": x for name, x in self.extra.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up where `state` left."""
        self.weights, self.extra = {}, {}
        for path, tensor in state.items():
            kind, rest = path.split("/", 1)
            if kind == "extra":
                self.extra[rest] = tensor
            else:
                part, name = rest.split("/", 1)
                self.weights.setdefault(part, {})[name] = tensor


def client_weights(weighting: str, examples: Sequence[int]) -> list[float]:
    """How much each client counts in an average."""
    return [float(count) if weighting == "examples" else 1.0 for count in examples]

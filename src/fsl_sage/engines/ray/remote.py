"""The S-server's actor, as the driver calls it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.engines.base import Server
from fsl_sage.roles.footprint import Footprint
from fsl_sage.wire.message import Message, Tensors


class RemoteServer(Server):
    """An S-server whose methods are calls of the actor."""

    def __init__(self, call: Callable[..., Any]) -> None:
        """`call` takes the name of a method of the actor and its arguments."""
        self._call = call

    def set_auxiliary(self, tensors: Tensors) -> None:
        """Send it an auxiliary that the F-server has averaged."""
        self._call("ask", "set_auxiliary", tensors)

    def take(self, tensors: Tensors) -> None:
        """Send it weights that the F-server has averaged."""
        self._call("ask", "take", tensors)

    def end_of_round(self, t: int) -> list[tuple[int, Message]]:
        """Alignment, where the algorithm has one."""
        messages: list[tuple[int, Message]] = self._call("ask", "end_of_round", t)
        return messages

    def remarks(self) -> dict[str, Any]:
        """Metrics of this round."""
        remarks: dict[str, Any] = self._call("ask", "remarks")
        return remarks

    def fidelity(self, *, seen: bool = False) -> Fidelity | None:
        """How well the auxiliaries estimate cut gradients, on a few clients' newest uploads."""
        found: Fidelity | None = self._call("ask", "fidelity", seen=seen)
        return found

    def footprint(self) -> Footprint | None:
        """Memory and operations of the first step."""
        found: Footprint | None = self._call("ask", "footprint")
        return found

    def take_loss(self) -> float | None:
        """Mean over the steps since the last call."""
        loss: float | None = self._call("ask", "take_loss")
        return loss

    def weights(self) -> Tensors | None:
        """The server-side model."""
        weights: Tensors = self._call("ask", "weights")
        return weights

    def recalibrated(self) -> Tensors | None:
        """The server-side model with BatchNorm statistics estimated anew."""
        weights: Tensors = self._call("ask", "recalibrated")
        return weights

    def state(self) -> Tensors:
        """A flat dict; between rounds."""
        state: Tensors = self._call("ask", "state")
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._call("load_state", state)

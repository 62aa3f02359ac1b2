"""How the arrays of a message are written for the way. Both halves of a codec, writing and reading, are one class."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from fsl_sage.wire.message import Tensors


class Codec(Protocol):
    """Writes named arrays at one end of the link and reads them at the other."""

    def encode(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The arrays that are sent; the ledger bills their bytes."""

    def decode(self, sent: Mapping[str, Tensor]) -> Tensors:
        """What the receiver makes of them."""


class Identity:
    """Arrays travel as they are."""

    def encode(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The arrays themselves."""
        return tensors

    def decode(self, sent: Mapping[str, Tensor]) -> Tensors:
        """The arrays themselves."""
        return dict(sent)

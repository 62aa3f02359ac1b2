"""What crosses between the roles: named arrays by kind, and plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fsl_sage.errors import InputError

Tensors = dict[str, Tensor]
"""Named tensors: a model part, an optimizer's state, a batch's target."""

# The kinds under which the ledger books what a message carries.
CLIENT_MODEL = "client model"
FULL_MODEL = "full model"
AUXILIARY = "auxiliary"
ACTIVATIONS = "activations"
LABELS = "labels"
CUT_GRADIENTS = "cut gradients"
LOGITS = "logits"
DECODER = "decoder"
CONTROL = "control"
"""SCAFFOLD's control variates: the change of a client's on the way up, the F-server's on the way down."""
FIRST_DOWNLOAD = "first download"
OPTIMIZER_STATE = "optimizer state"


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the arrays themselves, the payload, without any framing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True)
class Message:
    """Arrays by kind (`parts[kind][name]`) and plain values. Engines carry it without knowing what it means."""

    parts: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """By kind, the coded difference that is sent instead of the arrays to a client that has the version before."""

    def __post_init__(self) -> None:
        """Refuse kinds that could not be told apart where a message is written down."""
        for kind in self.parts:
            if "/" in kind or "@" in kind:
                raise InputError(f"A message has the kind '{kind}': give it a name without / and @.")

    def sizes(self) -> dict[str, int]:
        """The bytes of the arrays by kind."""
        return {kind: nbytes(tensors) for kind, tensors in self.parts.items()}

    @property
    def smashed(self) -> tuple[Tensor, ...]:
        """The cut-layer activations z_f, one tensor [B, *cut] for each boundary of the cut."""
        return tuple(self.parts[ACTIVATIONS].values())

    @property
    def target(self) -> Mapping[str, Tensor]:
        """What the loss needs besides the output, by name: the labels y [B], and what else the task needs."""
        return self.parts[LABELS]

    @property
    def cut_gradients(self) -> tuple[Tensor, ...]:
        """The gradients z_b of the loss with respect to each boundary tensor."""
        return tuple(self.parts[CUT_GRADIENTS].values())


PAUSE = Message({})
"""What a local round may yield between two of its steps, when it holds no graph: others may take their steps now.
Nothing is sent. An engine that has nothing to gain by it goes on at once."""


def _numbered(tensors: Sequence[Tensor]) -> Tensors:
    return {str(index): tensor.detach() for index, tensor in enumerate(tensors)}


def Smashed(z: Sequence[Tensor], target: Mapping[str, Tensor]) -> Message:  # noqa: N802
    """The upload (z_f, y) of Algorithm 1, line 11.

    Args:
        z: The smashed data, [B, *cut] each. The message has no graph.
        target: What the loss needs besides the output, by name, such as the labels [B].
    """
    return Message({ACTIVATIONS: _numbered(z), LABELS: dict(target)})


def CutGradients(gradients: Sequence[Tensor]) -> Message:  # noqa: N802
    """The S-server's answer to a client that waits: the gradients z_b, [B, *cut] each."""
    return Message({CUT_GRADIENTS: _numbered(gradients)})

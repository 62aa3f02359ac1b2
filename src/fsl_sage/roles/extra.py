"""What an algorithm keeps at a role."""

from collections.abc import Mapping

from torch import Tensor

from fsl_sage.errors import InputError
from fsl_sage.wire.message import Tensors


def kept(extra: Mapping[str, Tensor], role: str) -> Tensors:
    """What a role's `extra` holds, for its state; refused if it is more than tensors by name.

    Args:
        extra: By name, what the algorithm has put there.
        role: As the algorithm calls it: client, server or f_server.
    """
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{role}.extra[{name!r:.40}] is of type {type(value).__name__}: an algorithm keeps tensors by name "
                f"from round to round, such as {role}.extra['n'] = torch.tensor(1)."
            )
    return dict(extra)

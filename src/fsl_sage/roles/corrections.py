"""What keeps clients together while they train: FedProx's pull and SCAFFOLD's control variates.

The pull is added to the gradients before the optimizer sees them. The controls move the weights beside the optimizer's
step. Without momentum that is SCAFFOLD's own step, y - lr (g + c - c_i). With momentum it is what published tables do:
a control holds what momentum has done in a round already, and would grow from round to round if it went through
momentum once more. Both concern the weights that the F-server averages; buffers have no gradients and no controls.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fsl_sage.config import AveragingConfig
from fsl_sage.roles.protocols import ClientRole
from fsl_sage.wire.message import CONTROL, Tensors


def copies_kept(options: AveragingConfig) -> int:
    """How many tensors of a weight's size a client keeps for it: the one that came down; with controls, c and c_i."""
    return bool(options.proximal or options.control_variates) + 2 * options.control_variates


def pull(client: ClientRole, proximal: float, parts: Iterable[str]) -> None:
    """FedProx: add mu (x - x_received) to the gradients of these parts before a step (Li et al., 2020)."""
    for part in parts:
        for name, weight in client.parameters(part).items():
            if weight.grad is not None:
                weight.grad.add_(weight.detach() - client.received[part][name], alpha=proximal)


@torch.no_grad()
def follow_controls(client: ClientRole, lr: float, parts: Iterable[str]) -> None:
    """SCAFFOLD: with a step, also move the weights of these parts by -lr (c - c_i) (Karimireddy et al., 2020)."""
    for path, weight in _weights(client, parts):
        c, own = _controls(client, path, weight)
        weight.sub_(c - own, alpha=lr)


def renew_controls(client: ClientRole, parts: Iterable[str]) -> Tensors:
    """At the end of a client's round, option II: c_i+ = c_i - c + (x - x_i) / (sum of the learning rates).

    Returns the change of c_i, `PART/WEIGHT` to tensor, which goes to the F-server.
    """
    changes: Tensors = {}
    for path, weight in _weights(client, parts):
        c, own = _controls(client, path, weight)
        part, name = path.split("/", 1)
        if client.lr_used:
            changes[path] = (client.received[part][name] - weight.detach()) / client.lr_used - c
        else:  # no step was taken
            changes[path] = torch.zeros_like(weight)
        client.extra[f"{CONTROL}/{path}"] = own + changes[path]
    return changes


def _weights(client: ClientRole, parts: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for part in parts:
        yield from ((f"{part}/{name}", weight) for name, weight in client.parameters(part).items())


def _controls(client: ClientRole, path: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(c, c_i) of a weight, both of its shape; zeros before the first round."""
    c = client.received_extra.get(CONTROL, {}).get(path)
    own = client.extra.get(f"{CONTROL}/{path}")
    zeros = torch.zeros_like(weight) if c is None or own is None else weight
    return zeros if c is None else c, zeros if own is None else own

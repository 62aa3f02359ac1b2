"""Flat dicts of tensors whose names are paths, such as `optimizer/client/conv1.weight/exp_avg`: the form of a state."""

from collections.abc import Mapping

from torch import Tensor

from fsl_sage.wire.message import Tensors


def flat(groups: Mapping[str, Mapping[str, Tensor]], prefix: str = "") -> Tensors:
    """Join several dicts into one, whose names are `prefix` + group + "/" + name."""
    return {f"{prefix}{group}/{name}": x for group, tensors in groups.items() for name, x in tensors.items()}


def below(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors whose path starts with `prefix`, without it."""
    return {path[len(prefix) :]: tensor for path, tensor in tensors.items() if path.startswith(prefix)}


def grouped(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """The dicts that `flat` joined, by the first element of the paths."""
    groups: dict[str, Tensors] = {}
    for path, tensor in tensors.items():
        group, name = path.split("/", 1)
        groups.setdefault(group, {})[name] = tensor
    return groups


def by_client(tensors: Mapping[str, Tensor]) -> dict[int, Tensors]:
    """As `grouped`, for paths that begin with a client's number."""
    return {int(client): own for client, own in grouped(tensors).items()}

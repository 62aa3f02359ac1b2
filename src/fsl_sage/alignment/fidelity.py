"""Fidelity: how well an auxiliary's cut gradients estimate the server's.

The paper's epsilon^t (equation 7) is the squared distance of the *clients'* gradients: both sides multiplied by the
client's Jacobian. What is measured here are the cut gradients themselves, relative to the true ones.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsl_sage.alignment.dataset import Upload
from fsl_sage.alignment.passes import Passes
from fsl_sage.precision import wide

CLIENTS, SAMPLES = 3, 24
"""Fidelity is measured on the last samples of the newest upload of a few clients, drawn anew every round."""


class Fidelity(NamedTuple):
    """Cosine of estimated and true cut gradients (1 is best), and their distance squared over the true one's square."""

    cosine: float
    nmse: float


def fidelity(auxiliary: nn.Module, server: nn.Module, upload: Upload, passes: Passes) -> Fidelity | None:
    """Compare the two on one uploaded batch; changes neither. None where the true gradients are zero or not finite."""
    estimate = _flat(passes.cut_gradient(auxiliary, *upload)[0])
    truth = _flat(passes.cut_gradient(server, *upload)[0])
    square = truth.square().sum()
    if square == 0 or not square.isfinite():
        return None
    cosine = (estimate * truth).sum() / (estimate.square().sum() * square).sqrt()
    nmse = (estimate - truth).square().sum() / square
    return Fidelity(float(cosine.nan_to_num(0.0)), float(nmse)) if nmse.isfinite() else None


def mean(values: Iterable[Fidelity | None]) -> Fidelity | None:
    """The mean over the clients for which there is one."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Fidelity(*(math.fsum(column) / len(found) for column in zip(*found, strict=True)))


def _flat(gradients: tuple[Tensor, ...]) -> Tensor:
    # The squares of a mean loss's gradients are tiny.
    return torch.cat([wide(gradient.flatten()) for gradient in gradients])

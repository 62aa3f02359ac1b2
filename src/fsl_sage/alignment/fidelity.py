"""Fidelity: how well an auxiliary's cut gradients estimate the server's.

It is the paper's epsilon^t (equation 7) up to the client's Jacobian, which stands on both sides.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsl_sage.alignment.dataset import Upload
from fsl_sage.alignment.passes import Passes


class Fidelity(NamedTuple):
    """Cosine of estimated and true cut gradients (1 is best), and their distance squared over the true one's square."""

    cosine: float
    nmse: float


def fidelity(auxiliary: nn.Module, server: nn.Module, upload: Upload, passes: Passes) -> Fidelity:
    """Compare the two on one uploaded batch; changes neither."""
    estimate = _flat(passes.cut_gradient(auxiliary, *upload)[0])
    truth = _flat(passes.cut_gradient(server, *upload)[0])
    square = truth.square().sum()
    cosine = (estimate * truth).sum() / (estimate.square().sum() * square).sqrt()
    nmse = (estimate - truth).square().sum() / square
    return Fidelity(float(cosine.nan_to_num(0.0)), float(nmse))


def mean(values: list[Fidelity]) -> Fidelity:
    """The mean over clients."""
    return Fidelity(*(sum(column) / len(values) for column in zip(*values, strict=True)))


def _flat(gradients: tuple[Tensor, ...]) -> Tensor:
    # float64 (float32 where there is none): the squares of a mean loss's gradients are tiny.
    wide = torch.float32 if gradients[0].device.type == "mps" else torch.float64
    return torch.cat([gradient.flatten().to(wide) for gradient in gradients])

"""The closed-form alignment of a ridge auxiliary, from running sums over uploads (see `split.auxiliaries.ridge`).

An upload counts by its relative error, ‖G - XW‖² over the mean square of G. A server's gradients are largest before it
has learnt anything: by plain squares those of the first round would outweigh all that come later, and the estimate
would point where the server once was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsl_sage.alignment.matching import UnusableError
from fsl_sage.precision import all_finite, wide
from fsl_sage.split import Ridge
from fsl_sage.split.auxiliaries.ridge import CHUNK
from fsl_sage.wire.message import Tensors


@dataclass
class Sums:
    """What is known of all uploads so far, the older the less it counts; float64."""

    features: Tensor
    """X^T X, [F, F]."""
    products: Tensor
    """X^T G, [F, C]."""

    @classmethod
    def nothing(cls, ridge: Ridge, device: torch.device) -> "Sums":
        """Of no upload."""
        count, width = ridge.weight.shape
        zeros = wide(torch.zeros((), device=device))
        return cls(zeros.repeat(count, count), zeros.repeat(count, width))

    def add(
        self, ridge: Ridge, z: Sequence[Tensor], target: Mapping[str, Tensor], gradient: Tensor, forgetting: float
    ) -> None:
        """Add an upload, after a part of all before it is forgotten.

        One whose gradients are not finite, or all zero, or that has no example with a loss, is left out.

        Args:
            ridge: Makes the features.
            z: The upload's smashed data.
            target: Its labels.
            gradient: The server's cut gradient of the sum of the upload's losses, as large as the tensor of z.
            forgetting: That part, from 0 to below 1.
        """
        if not all_finite(gradient) or not all(map(all_finite, z)):
            return
        x, rows = ridge.rows(z, target)
        g = ridge.gradients(rows, gradient).to(x.dtype)
        if not bool(g.any()):  # nor where there are no rows
            return
        scale = float(wide(g).square().mean())
        self.features *= 1 - forgetting
        self.products *= 1 - forgetting
        for some, own in zip(torch.split(x, CHUNK), torch.split(g, CHUNK), strict=True):
            features = ridge.expanded(some)
            self.features += wide(features.T @ features) / scale
            self.products += wide(features.T @ own) / scale

    def state(self) -> Tensors:
        """For a checkpoint."""
        return {"features": self.features, "products": self.products}


def fit(sums: Sums, strength: float) -> Tensor:
    """W [F, C] of the sums; raises `UnusableError` where there is nothing to fit.

    A feature that was never there has a zero on the diagonal and no product, so whatever stands in the zero's place its
    weights are 0.
    """
    if not bool(sums.products.any()):
        raise UnusableError("the server's cut gradients are all zero")
    diagonal = sums.features.diagonal()
    held = torch.where(diagonal > 0, diagonal * strength, torch.ones_like(diagonal))
    factor, failed = torch.linalg.cholesky_ex(sums.features + torch.diag(held))
    weight = torch.cholesky_solve(sums.products, factor).contiguous()
    if bool(failed) or not all_finite(weight):
        raise UnusableError("the sums of the ridge auxiliary have no solution: a larger --alignment.ridge gives one")
    return weight

"""How much of an image a cut reveals: the distance correlation of images with what crosses the cut.

It is 1 where the distances between images are those between their activations, and 0 where they have nothing in common
(Székely et al., 2007; in split learning: Vepakomma et al., 2020). It is measured with the model's initial weights on
images that come with the package, with the correction for few samples of Székely and Rizzo (2013).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fsl_sage.config import Config
from fsl_sage.problems.images.mini import read_mini
from fsl_sage.problems.images.problem import ImageProblem
from fsl_sage.problems.parts import build_model
from fsl_sage.split import CutPoint

MOST, LEAST = 64, 16
"""Images that the measurement takes, for a small model and for a large one."""
_WORK = 1e11
"""FLOPs that the measurement may take before it looks at fewer images."""


def revealed(config: Config, problem: ImageProblem, points: Sequence[CutPoint]) -> dict[str, float]:
    """The distance correlation at each cut, by its name."""
    step = max(point.client_flops + point.server_flops for point in points)
    forward = step / 3 / config.batch_size  # a step's backward pass takes twice the work of its forward pass
    images = sample(problem, int(min(MOST, max(LEAST, _WORK / max(forward, 1)))))
    model = build_model(config, problem, torch.device("cpu")).eval()
    found = _distances(model, images, points)
    inputs = torch.cdist(images.flatten(1).double(), images.flatten(1).double())
    return {name: distance_correlation(inputs, squares.sqrt()) for name, squares in found.items()}


def sample(problem: ImageProblem, count: int) -> Tensor:
    """Images of the package in the shape of the problem's, normalised, [count, C, H, W]."""
    channels, height, width = problem.example(1, "meta").shape[1:]
    data = read_mini()
    images = data.terms.normalise(data.test.x[:count])
    if (height, width) != images.shape[2:]:
        images = F.interpolate(images, (height, width), mode="bilinear", antialias=True)
    return images.mean(1, keepdim=True).expand(-1, channels, -1, -1) if channels != 3 else images


def distance_correlation(one: Tensor, other: Tensor) -> float:
    """The distance correlation of two samples, from the distances within each, [n, n]; 0 for chance."""
    a, b = _centred(one), _centred(other)
    square = (a * b).sum() / ((a * a).sum() * (b * b).sum()).sqrt()
    return float(square.clamp(0, 1).sqrt()) if bool(square.isfinite()) else 0.0


def _centred(distances: Tensor) -> Tensor:
    """The distances with the means of rows and columns taken off, as the corrected estimate has it."""
    count = len(distances)
    rows = distances.sum(1, keepdim=True) / (count - 2)
    centred = distances - rows - rows.T + distances.sum() / ((count - 1) * (count - 2))
    return centred.fill_diagonal_(0.0)


@torch.no_grad()
def _distances(model: nn.Module, images: Tensor, points: Sequence[CutPoint]) -> dict[str, Tensor]:
    """For each cut the squared distances between what crosses it for each two images, [n, n], float64."""
    crossing: dict[tuple[str, int], set[int]] = defaultdict(set)
    for point in points:
        for tensor in point.tensors:
            if tensor.module is not None:
                crossing[tensor.module, tensor.nth].add(tensor.leaf)
    squares: dict[tuple[str, int, int], Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(_Note(name, crossing, squares))
        for name in {name for name, _ in crossing}
    ]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    none = torch.zeros(len(images), len(images), dtype=torch.float64)
    return {
        point.name: sum((squares.get((t.module or "", t.nth, t.leaf), none) for t in point.tensors), start=none)
        for point in points
    }


class _Note:
    """A hook that notes the distances between the outputs of a module, so that these need not be kept."""

    def __init__(
        self, name: str, crossing: dict[tuple[str, int], set[int]], squares: dict[tuple[str, int, int], Tensor]
    ) -> None:
        self._name, self._crossing, self._squares = name, crossing, squares
        self._calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        nth, self._calls = self._calls, self._calls + 1
        leaves = pytree.tree_leaves(output)
        for leaf in self._crossing.get((self._name, nth), ()):
            flat = leaves[leaf].flatten(1).double()
            self._squares[self._name, nth, leaf] = torch.cdist(flat, flat).square()

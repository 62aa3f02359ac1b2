"""The ridge auxiliary, row by row: what it knows of a row, and the least squares that fit it to the server's gradients.

Naive on purpose: every row is kept with its weight, and a general solver of least squares finds W, not the normal
equations.
"""

import torch
from torch import Tensor, nn

from tests.oracles.given import Given, Target


class RidgeAuxiliary(nn.Module):
    """The weights [features, channels]; of a language model also the frozen embedding [vocabulary, hidden]."""

    def __init__(self, features: int, channels: int, embedding: tuple[str, Tensor] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, channels, dtype=torch.float64))
        self.embedding = embedding[1] if embedding else None
        if embedding:  # the ledger of the first download counts it by its memory
            holder: nn.Module = self
            *path, last = embedding[0].split(".")
            for name in path:
                holder.add_module(name, nn.Module())
                holder = holder.get_submodule(name)
            holder.register_parameter(last, nn.Parameter(embedding[1], requires_grad=False))


def rows_of(given: Given, auxiliary: RidgeAuxiliary, z: Tensor, target: Target) -> list[tuple[tuple, Tensor]]:
    """For each row its place in z, by which `z[place]` are its channels, and its features."""
    rows = _tokens(auxiliary.embedding, z, target) if auxiliary.embedding is not None else _positions(z, target)
    assert given.ridge is not None
    signs = given.ridge.signs
    if signs is not None:
        rows = [(place, torch.cat([x, torch.relu(signs.double() @ x)])) for place, x in rows]
    return rows


def _tokens(embedding: Tensor, z: Tensor, target: Target) -> list[tuple[tuple, Tensor]]:
    """The tokens of each text up to the last that has a loss."""
    rows = []
    for text in range(len(z)):
        counted = [place for place in range(z.shape[1]) if target["mask"][text, place]]
        for place in range(max(counted) + 1 if counted else 0):
            following = embedding[int(target["labels"][text, place])]
            has_loss = torch.tensor([float(target["mask"][text, place]), 1.0], dtype=torch.float64)
            own = z[text, place]
            x = torch.cat([own / mean_square(own).sqrt(), following / mean_square(following).sqrt(), has_loss])
            rows.append(((text, place), x))
    return rows


def _positions(z: Tensor, target: Target) -> list[tuple[tuple, Tensor]]:
    """Every position of each image, with the mean over the image and the class."""
    rows = []
    for image in range(len(z)):
        scaled = z[image] / mean_square(z[image]).sqrt()
        whole = scaled.mean(dim=(1, 2))
        label = torch.zeros(10, dtype=torch.float64)
        label[int(target["labels"][image])] = 10**0.5
        for row in range(z.shape[2]):
            for column in range(z.shape[3]):
                x = torch.cat([scaled[:, row, column], whole, label, torch.ones(1, dtype=torch.float64)])
                rows.append(((image, slice(None), row, column), x))
    return rows


def mean_square(values: Tensor) -> Tensor:
    return values.square().mean()


def estimated_gradient(given: Given, auxiliary: RidgeAuxiliary, z: Tensor, target: Target) -> Tensor:
    """The estimate of the gradient of the batch's mean loss."""
    estimate = torch.zeros_like(z, requires_grad=False)
    with torch.no_grad():
        for place, x in rows_of(given, auxiliary, z.detach(), target):
            estimate[place] = auxiliary.weight.T @ x
    return estimate / given.terms(target)


class Regression:
    """All rows of all uploads, each with the weight that forgetting has left it.

    The rows of an upload begin with the weight 1 / (the mean of all squared entries of their gradients): a sum of
    relative errors is made small.
    """

    def __init__(self) -> None:
        self.features: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.weights: list[float] = []

    def add(self, given: Given, auxiliary: RidgeAuxiliary, z: Tensor, target: Target, gradient: Tensor) -> None:
        """An upload with the server's gradient of its mean loss."""
        assert given.ridge is not None
        self.weights = [weight * (1 - given.ridge.forgetting) for weight in self.weights]
        rows = list(rows_of(given, auxiliary, z, target))
        gradients = [gradient[place] * given.terms(target) for place, _ in rows]
        squares = [float(entry) ** 2 for g in gradients for entry in g.flatten()]
        self.features += [x for _, x in rows]
        self.gradients += gradients
        self.weights += [len(squares) / sum(squares)] * len(rows)

    def solve(self, strength: float) -> Tensor:
        """W: the least weighted squares, with each of its rows held by the weighted square of its feature."""
        root = torch.tensor(self.weights, dtype=torch.float64).sqrt()[:, None]
        x, g = root * torch.stack(self.features), root * torch.stack(self.gradients)
        hold = (strength * x.square().sum(0)).sqrt()
        hold[hold == 0] = 1.0
        above = torch.cat([x, torch.diag(hold)])
        wanted = torch.cat([g, torch.zeros(len(hold), g.shape[1], dtype=torch.float64)])
        return torch.linalg.lstsq(above, wanted, driver="gelsd").solution

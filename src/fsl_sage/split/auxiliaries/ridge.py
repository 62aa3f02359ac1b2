"""An auxiliary without a loss: a linear estimator of the cut gradient, fitted in closed form. It is beyond the paper.

The paper's auxiliary is a small model behind the cut. Its cut gradients are aligned with the server's by gradient
descent through a gradient (equation 3). Behind the first blocks of a language model that fails: what is missing is the
Jacobian of the many blocks that a small model leaves out, and an alignment has too few steps and texts to learn it. A
linear map has no such trouble, for the best one is found exactly.

**What it estimates.** The cut gradient of one row is g [C]: the gradient, by the row's C channels of z, of the sum of
the losses of a batch. (Divided by the number of loss terms it is the gradient of the mean loss, which training uses.)
The estimate is g-hat = W^T x, with x [F] made of what the client has:

- Language models. A row is a token. x = [z / rms(z) of the token; the embedding of the next token / its rms; whether
  that token has a loss; 1]. The client has the embedding because it is its own first layer, and the label travels with
  every upload. Behind the last token of a text that has a loss the cut gradient is 0, because later tokens reach no
  loss in a causal model. Such rows are left out, and the estimate there is 0.
- One label for a sample, as for images. A row is a position of z. x = [z / rms; the mean of z over the positions / rms;
  the label, one-hot; 1], with the rms over all of the sample's z. The same map serves every position, so there are few
  weights and many rows to fit them by. The mean over the positions is there because the gradient depends on what the
  whole model predicts, which one position does not tell. The rms is the sample's and not the position's, because behind
  a ReLU a position may be all zero. Flattened samples in the place of positions would need (C H W)^2 sums.

`ridge:N` adds N random features relu(R x) to x. R [N, F] has entries of +1 and -1, over sqrt(F), drawn from the run's
seed. So R does not travel: every role draws the same bits, on every machine.

**How it is fitted.** The S-server keeps the running sums X^T X [F, F] and X^T G [F, C] over the rows of all uploads.
The gradients G are a by-product of its own training step, so an upload costs two matrix products, and it is not stored.
Before an upload is added the sums are multiplied by 1 - `alignment.forgetting`: gradients of an older server mislead.
An alignment solves (X^T X + s diag(X^T X)) W = X^T G, with s = `alignment.ridge`. With the diagonal the solution does
not depend on the units of the features. For s -> 0, without forgetting, and with a server that stands still, W is the
exact minimum of the paper's alignment problem (equation 3) in its class.

**What travels.** W, as any auxiliary. It starts at 0, so the clients stand still until the first alignment. There is no
loss that could train it: algorithms whose clients train their auxiliaries refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.seeding import numpy_generator
from fsl_sage.split.errors import SplitError
from fsl_sage.split.plan.split_plan import BoundaryTensor

NAME = "ridge"
MOST_VALUES = 1024
"""Of a label that is written one-hot: the sums have the square of as many entries."""
CHUNK = 8192
"""Rows whose features are made at once."""


def random_features(spec: object) -> int | None:
    """The number of random features of a ridge auxiliary; None if the specification is that of another auxiliary."""
    if not isinstance(spec, str) or spec.partition(":")[0] != NAME:
        return None
    _, colon, count = spec.partition(":")
    if not colon:
        return 0
    if not count.isdecimal() or int(count) < 1:
        raise SplitError(f'"{spec}" is no auxiliary: give "ridge", or "ridge:N" with N random features, such as 3072')
    return int(count)


class Ridge(nn.Module):
    """g-hat = W^T x. It has no output and no loss; `estimate` is all that it does."""

    def __init__(
        self,
        boundary: Sequence[BoundaryTensor],
        *,
        values: int | None = None,
        embedding: tuple[str, nn.Parameter] | None = None,
        random: int = 0,
        seed: int = 0,
    ) -> None:
        """The weights W [F, C] are 0.

        Args:
            boundary: What crosses the cut; one tensor of it has a gradient.
            values: How many values a label has, one label for a sample.
            embedding: In its place, the name and the weights [V, E], frozen, of the embedding that turns labels, one
                for a token, into features.
            random: The number of random features.
            seed: From which those are drawn.
        """
        super().__init__()
        found = [place for place, tensor in enumerate(boundary) if tensor.has_gradient]
        if len(found) != 1:
            names = ", ".join(boundary[place].name for place in found)
            raise SplitError(
                f"a ridge auxiliary estimates the gradient of one tensor; here {len(found)} cross: {names}"
            )
        shape = boundary[found[0]].shape
        if embedding is None and (values is None or values > MOST_VALUES):
            known = "is not known" if values is None else f"is {values}"
            raise SplitError(f"a ridge auxiliary needs labels of at most {MOST_VALUES} values; their number {known}")
        self.place = found[0]
        """Which of the boundary's tensors has a gradient."""
        self.channels = 1 if len(shape) > 3 else len(shape) - 1
        """The dimension of the channels: of images the first behind the batch, else the last."""
        self.values = values
        self.pooled = embedding is None and len(shape) > 2
        self.embedding_name = embedding[0] if embedding else None
        self.random = random
        self.seed = seed
        if embedding is not None:
            _put(self, *embedding)
        width = shape[self.channels]
        label = embedding[1].shape[1] + 1 if embedding else (values or 0)
        self.inputs = width * (2 if self.pooled else 1) + label + 1
        """The number of features that are not random."""
        device = embedding[1].device if embedding else torch.get_default_device()
        self.weight = nn.Parameter(torch.zeros(self.inputs + random, width, device=device))
        self._drawn = _Drawn()

    def forward(self, *boundary: Any) -> Any:
        """Nothing: refused."""
        raise SplitError("a ridge auxiliary has no output, only an estimate of the cut gradient")

    @torch.no_grad()
    def estimate(self, z: Sequence[Tensor], target: Mapping[str, Tensor]) -> Tensor:
        """g-hat, as large as the boundary's tensor with a gradient: of the sum of the batch's losses."""
        x, rows = self.rows(z, target)
        weight = self.weight.to(x.dtype)
        found = torch.cat([self.expanded(chunk) @ weight for chunk in torch.split(x, CHUNK)])
        like = z[self.place]
        flat = found.new_zeros(rows.shape[0], found.shape[1])
        flat[rows] = found
        last = like.movedim(self.channels, -1)
        return flat.view(last.shape).movedim(-1, self.channels).to(like.dtype)

    @torch.no_grad()
    def rows(self, z: Sequence[Tensor], target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(x [n, inputs], without the random features; which of all positions these rows are, bool [B * positions])."""
        own = z[self.place].detach()
        own = own if own.dtype == torch.float64 else own.float()
        # What came over a network lies in memory in another order than what did not, and sums would have other bits.
        own = own.movedim(self.channels, -1).contiguous()  # [B, ..., C]
        features = self._of_tokens(own, target) if self.embedding_name else self._of_samples(own, target)
        x = torch.cat([*features, torch.ones_like(features[0][..., :1])], -1).flatten(0, -2)
        rows = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        if self.embedding_name:
            rows = _reached(target["mask"]).flatten()
        return x[rows], rows

    def _of_tokens(self, z: Tensor, target: Mapping[str, Tensor]) -> list[Tensor]:
        assert self.embedding_name is not None
        following = self.get_parameter(self.embedding_name)[target["labels"].long()].to(z.dtype)
        return [_unit(z, (-1,)), _unit(following, (-1,)), target["mask"].to(z.dtype)[..., None]]

    def _of_samples(self, z: Tensor, target: Mapping[str, Tensor]) -> list[Tensor]:
        z = _unit(z, tuple(range(1, z.ndim)))
        positions = tuple(range(1, z.ndim - 1))
        assert self.values is not None
        label = nn.functional.one_hot(target["labels"].long(), self.values).to(z.dtype) * math.sqrt(self.values)
        label = label.view(len(z), *[1] * len(positions), self.values).expand(*z.shape[:-1], -1)
        return [z, *([z.mean(positions, keepdim=True).expand_as(z)] if self.pooled else []), label]

    def expanded(self, x: Tensor) -> Tensor:
        """[n, F]: x with the random features behind it."""
        if not self.random:
            return x
        return torch.cat([x, torch.relu(x @ self._drawn.signs(self.random, self.inputs, self.seed).to(x).T)], -1)

    def gradients(self, rows: Tensor, gradients: Tensor) -> Tensor:
        """Of gradients, as large as z, those of these rows: [n, C]."""
        return gradients.movedim(self.channels, -1).contiguous().flatten(0, -2)[rows]

    def flops(self, shape: Sequence[int]) -> int:
        """Floating-point operations of an estimate for a boundary tensor of this shape, if all its rows count."""
        rows = math.prod(shape) // shape[self.channels]
        return 2 * rows * (self.weight.numel() + self.random * self.inputs)


class _Drawn:
    """The matrix R, drawn when it is first needed. It is no tensor of the module, so it is neither saved nor sent."""

    def __init__(self) -> None:
        self._signs: Tensor | None = None

    def signs(self, count: int, inputs: int, seed: int) -> Tensor:
        """[count, inputs], +1 or -1 over sqrt(inputs)."""
        if self._signs is None:
            drawn = numpy_generator(seed, "ridge").integers(0, 2, (count, inputs), dtype="int8")
            self._signs = (torch.from_numpy(drawn).float() * 2 - 1) / math.sqrt(inputs)
        return self._signs

    def __deepcopy__(self, memo: Any) -> _Drawn:
        return self  # it never changes

    def __getstate__(self) -> dict[str, Any]:
        return {"_signs": None}  # another process draws its own


def rms(z: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    """The root of the mean square over these dimensions, which stay with size 1; never 0."""
    return z.square().mean(dimensions, keepdim=True).sqrt().clamp_min(torch.finfo(z.dtype).tiny ** 0.5)


def _unit(z: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    return z / rms(z, dimensions)


def _reached(mask: Tensor) -> Tensor:
    """The positions, [B, L], up to the last of a text that counts: a causal model's losses reach no other."""
    return mask.int().flip(1).cummax(1).values.flip(1).bool()


def _put(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Hold a frozen weight under the name that it has in the model, so that it is found in the model's files."""
    *holders, attribute = name.split(".")
    for holder in holders:
        if holder not in module._modules:
            module.add_module(holder, nn.Module())
        module = module.get_submodule(holder)
    assert not weight.requires_grad
    module.register_parameter(attribute, weight)

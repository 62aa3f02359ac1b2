"""The alignment of FSL-SAGE: what is kept of uploads, and how an auxiliary learns the server's cut gradients."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tests.oracles.common import cut_gradient, trained
from tests.oracles.given import Given, Target


@dataclass(frozen=True)
class Samples:
    """An upload (z_f, y), a part of one, or a batch of the alignment."""

    z: Tensor
    target: Target

    def __len__(self) -> int:
        return len(self.z)

    def __getitem__(self, some: slice) -> "Samples":
        return Samples(self.z[some], {name: tensor[some] for name, tensor in self.target.items()})


def keep_newest(uploads: list[Samples], samples: int) -> list[Samples]:
    """The newest `samples` samples of a client; of the oldest upload the front makes room; a rest of one is dropped."""
    kept: list[Samples] = []
    room = samples
    for upload in reversed(uploads):
        if len(upload) <= room:
            kept.insert(0, upload)
            room -= len(upload)
            continue
        rest = upload[len(upload) - room :]
        if len(rest) > 1:
            kept.insert(0, rest)
        break
    return kept


def keep_newest_of_all(arrived: list[tuple[int, Samples]], samples: int, total: int) -> list[tuple[int, Samples]]:
    """Of the client that came last its newest `samples` samples, then of all clients the newest `total`."""
    client = arrived[-1][0]
    own = keep_newest([upload for number, upload in arrived if number == client], samples)
    others = sum(number == client for number, _ in arrived) - len(own)
    kept: list[tuple[int, Samples]] = []
    for number, upload in arrived:
        if number != client:
            kept.append((number, upload))
        elif others > 0:
            others -= 1
        else:
            kept.append((client, own.pop(0)))
    newest = keep_newest([upload for _, upload in kept], total)
    return [(number, upload) for (number, _), upload in zip(kept[len(kept) - len(newest) :], newest, strict=True)]


def join(uploads: list[Samples]) -> Samples:
    """Uploads one behind the other."""
    names = uploads[0].target
    return Samples(
        _concatenate([upload.z for upload in uploads]),
        {name: _concatenate([upload.target[name] for upload in uploads]) for name in names},
    )


def _concatenate(tensors: list[Tensor]) -> Tensor:
    """Of different lengths (dimension 1, texts): the shorter ones are filled up with zeros at the end."""
    if tensors[0].dim() > 1:
        longest = max(tensor.shape[1] for tensor in tensors)
        tensors = [_fill(tensor, longest) for tensor in tensors]
    return torch.cat(tensors)


def _fill(tensor: Tensor, length: int) -> Tensor:
    later_dimensions = [0, 0] * (tensor.dim() - 2)
    return F.pad(tensor, [*later_dimensions, 0, length - tensor.shape[1]])


def cut_batches(uploads: list[Samples], batch_size: int) -> list[Samples]:
    """The alignment's batches (0: as uploaded). A single left-over sample joins the batch before it."""
    if batch_size == 0:
        return list(uploads)
    everything = join(uploads)
    starts = list(range(0, len(everything), batch_size))
    if len(starts) > 1 and len(everything) - starts[-1] == 1:
        starts.pop()
    ends = [*starts[1:], len(everything)]
    return [everything[start:end] for start, end in zip(starts, ends, strict=True)]


def keep_newest_tokens(uploads: list[tuple[int, Samples]], tokens: int) -> list[tuple[int, Samples]]:
    """Uploads of all clients as they came. Texts are dropped one by one from the front until the rest fits; a rest of
    one text is dropped too."""
    kept = list(uploads)
    while sum(upload.z.shape[0] * upload.z.shape[1] for _, upload in kept) > tokens:
        client, oldest = kept[0]
        kept[0] = client, oldest[1:]
        if len(oldest) == 1:
            kept.pop(0)
    if kept and len(kept[0][1]) == 1:
        kept.pop(0)
    return kept


def sample_gradients(given: Given, module: nn.Module, batch: Samples, create_graph: bool = False) -> Tensor:
    """z_b: the cut gradients by sample. The gradient of the mean loss, times the number of terms in the mean."""
    gradient = cut_gradient(given, module, batch.z, batch.target, create_graph)
    return given.terms(batch.target) * gradient


def alignment_targets(given: Given, server: nn.Module, batches: list[Samples]) -> tuple[list[Tensor], float]:
    """z_b of every batch with the server as it is, and the mean over all samples of |z_b|^2."""
    targets = [sample_gradients(given, server, batch) for batch in batches]
    mean_square = sum(float(z_b.square().sum()) for z_b in targets) / sum(len(batch) for batch in batches)
    return targets, mean_square


def alignment_loss(given: Given, auxiliary: nn.Module, batch: Samples, z_b: Tensor, mean_square: float) -> Tensor:
    """How far the auxiliary's cut gradients are from the server's, relative to the size of the latter."""
    estimate = sample_gradients(given, auxiliary, batch, create_graph=True)
    return (estimate - z_b).square().sum() / (len(batch) * mean_square)


def direction_loss(given: Given, auxiliary: nn.Module, batch: Samples, z_b: Tensor) -> Tensor:
    """sum_i |g_i| (1 - cos_i) / sum_i |g_i|, row by row."""
    estimate = sample_gradients(given, auxiliary, batch, create_graph=True)
    losses, lengths = [], []
    for place in rows(given, z_b):
        length = z_b[place].square().sum().sqrt()
        if length > 0:
            cosine = (estimate[place] * z_b[place]).sum() / (estimate[place].square().sum().sqrt() * length)
            losses.append(length * (1 - cosine))
            lengths.append(length)
    return sum(losses) / sum(lengths)


def rows(given: Given, z_b: Tensor) -> list[tuple[int, ...]]:
    """The places of the loss terms."""
    if not given.token_rows:
        return [(sample,) for sample in range(len(z_b))]
    return [(sample, token) for sample in range(len(z_b)) for token in range(z_b.shape[1])]


def fitted_scale(given: Given, auxiliary: nn.Module, batches: list[Samples], targets: list[Tensor]) -> float:
    """The s that makes sum |s g-hat - g|^2 least, by a solver of least squares."""
    estimates = torch.cat([sample_gradients(given, auxiliary, batch, create_graph=True).flatten() for batch in batches])
    wanted = torch.cat([z_b.flatten() for z_b in targets])
    return float(torch.linalg.lstsq(estimates.detach()[:, None], wanted[:, None]).solution)


def align(
    given: Given,
    server: nn.Module,
    auxiliary: nn.Module,
    optimizer: Optimizer,
    batches: list[Samples],
    order: list[int],
) -> bool:
    """Trains the auxiliary to give the server's cut gradients. Returns whether there was anything to learn."""
    targets, mean_square = alignment_targets(given, server, batches)
    if mean_square == 0 or not math.isfinite(mean_square):
        return False
    for index in order:
        if given.alignment.loss == "cosine":
            loss = direction_loss(given, auxiliary, batches[index], targets[index])
        else:
            loss = alignment_loss(given, auxiliary, batches[index], targets[index], mean_square)
        optimizer.zero_grad()
        loss.backward()
        if given.alignment.clip is not None:
            clip_grad_norm_(trained(auxiliary), given.alignment.clip, foreach=False)
        optimizer.step()
    if given.alignment.loss == "cosine":
        auxiliary.fitted_scale.fill_(fitted_scale(given, auxiliary, batches, targets))
    return True

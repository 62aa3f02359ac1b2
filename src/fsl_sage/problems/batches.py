"""From a client's examples to batches: their sizes and their order."""

import torch
from torch import Tensor

from fsl_sage.errors import InputError


def batch_sizes(examples: int, batch_size: int) -> list[int]:
    """Sizes of the batches of one epoch; a single left-over sample joins the batch before it, BatchNorm needs two."""
    if batch_size < 2:
        raise InputError(f"a batch size of {batch_size} is too small: BatchNorm needs at least 2")
    if examples < 2:
        raise InputError(f"{examples} images make no batch: there must be at least 2")
    full, rest = divmod(examples, batch_size)
    sizes = [batch_size] * full
    if rest == 1:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


def batch_indices(examples: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """One epoch: a random permutation of 0 … examples - 1, cut into batches of `batch_sizes`."""
    order = torch.randperm(examples, generator=generator)
    return list(order.split_with_sizes(batch_sizes(examples, batch_size)))

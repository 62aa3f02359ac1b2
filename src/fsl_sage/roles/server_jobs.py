"""The S-server's heavy work: aligning, measuring fidelity, estimating statistics, as jobs that any worker can do."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fsl_sage.alignment.dataset import Upload, batches
from fsl_sage.alignment.fidelity import Fidelity, fidelity
from fsl_sage.alignment.matching import UnusableError, align, alignment_optimizer
from fsl_sage.alignment.regression import Sums, fit
from fsl_sage.config import AlignmentConfig
from fsl_sage.models.norm import recalibrated
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.work import Settings, Workbench
from fsl_sage.seeding import generator
from fsl_sage.wire.message import Tensors

Job = Callable[[Workbench, Settings, Any, Any], Any]
"""A function of a worker's modules, the settings, what all calls share, and one item. It may run in any process."""

SpreadOver = Callable[[Job, Any, Sequence[Any]], list[Any]]
"""Calls a job with what is shared and each item, in parallel if there are workers; results in the items' order."""

POOLED = -1
"""The "client" of an auxiliary that all clients share."""


RIDGE_WEIGHT = "weight"
"""The name of W, all that is fitted of a ridge auxiliary."""


class Alignment(NamedTuple):
    """One auxiliary that is to be aligned."""

    client: int
    """The client that it belongs to, or POOLED."""
    start: Tensors
    optimizer: Tensors
    """The optimizer's state after the alignment before; empty for a new optimizer."""
    uploads: Sequence[Upload]


class Aligned(NamedTuple):
    """An aligned auxiliary, and the optimizer's state where it is kept."""

    auxiliary: Tensors
    optimizer: Tensors


def align_one(workbench: Workbench, settings: Settings, shared: tuple[int, Tensors], item: Alignment) -> Aligned | str:
    """Align one auxiliary. `shared` is (the round, the server-side model). Returns the reason if it is not possible."""
    t, model = shared
    config: AlignmentConfig = settings.config.alignment
    server = Replica(workbench.slots["server"], model, None)
    start = _overlay(item.start, server.slots.frozen() | model) if config.start == "server" else item.start
    auxiliary = Replica(workbench.slots["auxiliary"], start, partial(alignment_optimizer, config))
    auxiliary.load_optimizer_state({path: tensor.clone() for path, tensor in item.optimizer.items()})
    order = generator(settings.config.seed, "alignment", item.client, t)
    try:
        align(auxiliary.module(), server.module(), item.uploads, settings.passes, config, order, auxiliary.optimizer)
    except UnusableError as error:
        return str(error)
    return Aligned(auxiliary.weights(), auxiliary.optimizer_state() if config.optimizer_state == "kept" else {})


def fit_one(workbench: Workbench, settings: Settings, shared: None, item: Sums) -> Aligned | str:
    """Align one ridge auxiliary, by its sums. Returns why, where that is not possible."""
    layout = workbench.slots["auxiliary"].layouts[RIDGE_WEIGHT]
    try:
        return Aligned({RIDGE_WEIGHT: fit(item, settings.config.alignment.ridge).to(layout.dtype)}, {})
    except UnusableError as error:
        return str(error)


@torch.no_grad()
def recalibrate(workbench: Workbench, settings: Settings, model: Tensors, uploads: Sequence[Upload]) -> Tensors:
    """The model with BatchNorm statistics of these uploads, in batches as the alignment takes them."""
    server = Replica(workbench.slots["server"], {name: tensor.clone() for name, tensor in model.items()}, None)
    with recalibrated(server.module()) as module, settings.passes.autocast():
        for batch in batches(uploads, settings.config.alignment.batch_size):
            module(*batch.z)
    return server.weights()


def fidelity_one(
    workbench: Workbench, settings: Settings, model: Tensors, item: tuple[Tensors, Upload]
) -> Fidelity | None:
    """The fidelity of one auxiliary to the server-side model, on one upload."""
    auxiliary = Replica(workbench.slots["auxiliary"], item[0], None)
    server = Replica(workbench.slots["server"], model, None)
    return fidelity(auxiliary.module(), server.module(), item[1], settings.passes)


def _overlay(tensors: Tensors, other: Tensors) -> Tensors:
    """`tensors` with those of `other` that have the same name and shape."""
    return {n: other[n] if n in other and other[n].shape == x.shape else x for n, x in tensors.items()}

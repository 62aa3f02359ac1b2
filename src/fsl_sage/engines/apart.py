"""Clients that wait but have nothing to do with each other: a large round is played group by group.

In SplitFed-MS each client has a server-side model of its own. All models of a round, with their optimizers, can be far
more than the memory: 126 MB for each ResNet-18 client. So as many clients as fit take their rounds together, their
models are folded into the average, and the next ones begin. It changes no bit of a run.
"""

from collections.abc import Sequence

from fsl_sage.engines.base import Setup
from fsl_sage.optimizers import state_shapes
from fsl_sage.units import MIB
from fsl_sage.wire.message import nbytes


def folds_copies(setup: Setup, clients: Sequence[int]) -> bool:
    """Whether the clients' own server-side models can be averaged as they come.

    So it is with the plain mean, summed in the order of the clients, if every client will come to its end.
    """
    config = setup.settings.config
    plain = config.averaging.rule == "mean" and config.on_client_failure == "stop"
    return setup.algorithm.clients_are_apart and plain and list(clients) == sorted(clients)


def clients_together(setup: Setup, workers: int) -> int:
    """How many clients of such a round fit into --client-memory-mib; at least one for each worker."""
    return max(workers, setup.settings.config.client_memory_mib * MIB // _bytes_of_one(setup))


def _bytes_of_one(setup: Setup) -> int:
    """What is held for a client during its round: weights, and what optimizers remember, at both ends."""
    optimizer = setup.settings.config.optimizer
    parts = [setup.initial[part] for part in {*setup.algorithm.holds, "server"}]
    return sum(nbytes(own) + nbytes(state_shapes(optimizer.name, own, optimizer.momentum)) for own in parts)

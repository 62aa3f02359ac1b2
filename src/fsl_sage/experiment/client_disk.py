"""The disk that clients' states will take where they do not fit into memory, said before a run starts."""

import shutil
from pathlib import Path
from warnings import warn

from fsl_sage.config import Config
from fsl_sage.engines.apart import folds_copies
from fsl_sage.engines.base import Setup
from fsl_sage.errors import InputError, RunWarning, listed
from fsl_sage.units import MIB, bytes_text
from fsl_sage.wire.message import nbytes

WORTH_A_WORD = 2**30
"""Fewer bytes than these are taken without a word."""


def say_disk_use(setup: Setup, directory: Path) -> None:
    """Warn of the disk that the states will take in files of a directory; refused if there is less than that."""
    config = setup.settings.config
    needed = disk_needed(setup)
    if not needed:
        return
    taken = sum(path.stat().st_size for path in directory.iterdir()) if directory.is_dir() else 0
    free = shutil.disk_usage(directory.parent).free + taken
    stored, waiting = stored_bytes(setup), waiting_bytes(setup)
    states = f"The states of {config.clients} clients, {bytes_text(state_bytes(setup))} each, are" * bool(stored)
    held = f"{'and what' if stored else 'What'} the clients of a round hold while they wait is" * bool(waiting)
    what = (
        f"{' '.join(filter(None, (states, held)))} more than --client-memory-mib {config.client_memory_mib}. That will "
        f"take up to {bytes_text(needed)} of disk in {directory}, where {bytes_text(free)} are free"
    )
    if needed > free:
        remedies = [*["--client-optimizer reset"] * bool(stored), *["a smaller --cohort"] * bool(waiting)]
        raise InputError(f"{what}: give another --out, or {listed(remedies, 'or')}.")
    if needed >= WORTH_A_WORD:
        warn(f"{what}.", RunWarning, stacklevel=6)


def disk_needed(setup: Setup) -> int:
    """At most as many bytes at any time; 0 if all fits into memory."""
    return stored_bytes(setup) + waiting_bytes(setup)


def waiting_bytes(setup: Setup) -> int:
    """What all clients of a round hold while they wait for each other: weights, and what optimizers remember."""
    config, algorithm = setup.settings.config, setup.algorithm
    if not (algorithm.waits and algorithm.answers_one_by_one) or config.order == "blocked":
        return 0
    if folds_copies(setup, range(_in_a_round(config))):  # as many train at a time as fit into memory
        return 0
    trained = [nbytes(setup.initial[part]) for part in algorithm.trained_in(config.rounds) if part in algorithm.holds]
    needed = (1 + _moments(config)) * sum(trained) * _in_a_round(config)
    return needed if needed > config.client_memory_mib * MIB else 0


def stored_bytes(setup: Setup) -> int:
    """Of states: the versions of the last checkpoint, and those that are newer."""
    config = setup.settings.config
    each = state_bytes(setup)
    if each * config.clients <= config.client_memory_mib * MIB:
        return 0
    between = config.checkpoint_every or config.rounds  # rounds, at most
    return each * (config.clients + min(config.clients, _in_a_round(config) * between))


def _in_a_round(config: Config) -> int:
    """How many clients take part in a round."""
    return max(1, round(config.cohort * config.clients))


def _moments(config: Config) -> int:
    """How many numbers of each weight an optimizer remembers."""
    return {"adam": 2, "adamw": 2}.get(config.optimizer.name, int(config.optimizer.momentum > 0))


def state_bytes(setup: Setup) -> int:
    """The bytes of a client's state: what its optimizers remember, and weights that are its alone."""
    settings, algorithm = setup.settings, setup.algorithm
    config = settings.config
    pooled = config.alignment.scope == "pooled"
    whole = 0
    for part in algorithm.holds:
        weights = setup.initial[part]
        trained = nbytes({name: x for name, x in weights.items() if name in settings.trained[part]})
        if part in algorithm.trained_in(config.rounds):
            whole += _moments(config) * trained * settings.keeps_optimizer(averaged=part in algorithm.averaged)
            whole += trained * (config.averaging.control_variates and part in algorithm.averaged)
        if part in algorithm.averaged:
            whole += nbytes({name: x for name, x in weights.items() if name in settings.stays_local.get(part, ())})
        elif part in algorithm.trained_in(config.rounds) or not pooled:  # a pooled auxiliary is there once for all
            whole += nbytes(weights)
    return whole

"""The disk that clients' states will take where they do not fit into memory, said before a run starts."""

import math
import shutil
from pathlib import Path
from warnings import warn

from fsl_sage.config import Config
from fsl_sage.engines.apart import folds_copies
from fsl_sage.engines.base import Setup
from fsl_sage.engines.threads import number_of_workers
from fsl_sage.errors import InputError, RunWarning, listed
from fsl_sage.optimizers import state_shapes
from fsl_sage.problems.parts import EXAMPLES_TO_CUT
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.split import crossing_tensors
from fsl_sage.units import MIB, bytes_text
from fsl_sage.wire.message import Tensors, nbytes

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
    each = bytes_text(max(state_sizes(setup)))
    states = f"The states of {config.clients} clients, up to {each} each, are" * bool(stored)
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
    """What all clients that train at a time hold while they wait for each other: weights, and optimizers' states.

    It moves into files on the local engine and the CPU alone, where a worker has more than one client.
    """
    config, algorithm = setup.settings.config, setup.algorithm
    if config.engine != "local" or setup.settings.device.type != "cpu":
        return 0
    if not (algorithm.waits and algorithm.answers_one_by_one) or config.order == "blocked":
        return 0
    if folds_copies(setup, range(_in_a_round(config))):  # as many train at a time as fit into memory
        return 0
    together = _most_together(setup)
    if together <= number_of_workers(setup.settings, len(setup.examples)):
        return 0
    trained = [part for part in algorithm.trained_in(config.rounds) if part in algorithm.holds]
    needed = together * sum(nbytes(setup.initial[part]) + _remembered(setup, part) for part in trained)
    return needed if needed > config.client_memory_mib * MIB else 0


def _most_together(setup: Setup) -> int:
    """How many clients of a round train at the same time: all, or those of its largest turn."""
    config = setup.settings.config
    cohort = range(_in_a_round(config))
    steps = {client: len(local_batch_sizes(len(setup.examples[client]), config)) for client in cohort}
    return max(map(len, setup.algorithm.turns(0, cohort, steps)))


def stored_bytes(setup: Setup) -> int:
    """Of states: the versions of the last checkpoint, and those that are newer."""
    config = setup.settings.config
    sizes = state_sizes(setup)
    if sum(sizes) <= config.client_memory_mib * MIB:
        return 0
    between = config.checkpoint_every or config.rounds  # rounds, at most
    newer = min(config.clients, _in_a_round(config) * between)
    return sum(sizes) + sum(sorted(sizes)[-newer:]) + _shared_bytes(setup)


def _in_a_round(config: Config) -> int:
    """How many clients take part in a round."""
    return max(1, round(config.cohort * config.clients))


def _remembered(setup: Setup, part: str) -> int:
    """The bytes that an optimizer of a part remembers."""
    optimizer = setup.settings.config.optimizer
    return nbytes(state_shapes(optimizer.name, _trained(setup, part), optimizer.momentum))


def state_sizes(setup: Setup) -> list[int]:
    """By client the bytes of its state: optimizers, weights that are its alone, what codecs and --hold keep."""
    config, algorithm = setup.settings.config, setup.algorithm
    alike = sum(_part_bytes(setup, part) for part in algorithm.holds)
    if getattr(algorithm.options, "hold", 0):
        alike += nbytes(_trained(setup, "client"))
    if setup.settings.codecs.update is not None:  # what coding has lost of each number
        alike += sum(nbytes(_trained(setup, part)) for part in algorithm.averaged_in(config.rounds))
    if setup.settings.codecs.cached is None:
        return [alike] * config.clients
    return [alike + len(own) * _activation_bytes(setup, client) for client, own in enumerate(setup.examples)]


def _part_bytes(setup: Setup, part: str) -> int:
    """What a client's state has of a part that it holds."""
    settings, algorithm = setup.settings, setup.algorithm
    config, weights = settings.config, setup.initial[part]
    trained, whole = nbytes(_trained(setup, part)), 0
    if part in algorithm.trained_in(config.rounds):
        whole += _remembered(setup, part) * settings.keeps_optimizer(averaged=part in algorithm.averaged)
        whole += trained * (config.averaging.control_variates and part in algorithm.averaged)
    if part in algorithm.averaged:
        whole += nbytes({name: x for name, x in weights.items() if name in settings.stays_local.get(part, ())})
    elif not _is_shared(setup, part):
        whole += nbytes(weights)
    return whole


def _trained(setup: Setup, part: str) -> Tensors:
    return {name: x for name, x in setup.initial[part].items() if name in setup.settings.trained[part]}


def _is_shared(setup: Setup, part: str) -> bool:
    """Whether clients have a part as one, in one file: a pooled auxiliary. On Ray each has a file of its own."""
    config, algorithm = setup.settings.config, setup.algorithm
    alone = part in algorithm.averaged or part in algorithm.trained_in(config.rounds) or config.engine == "ray"
    return not alone and config.alignment.scope == "pooled"


def _shared_bytes(setup: Setup) -> int:
    """Of what clients have as one: the checkpoint's version, the newest, and those of clients that were away since.

    One of n clients is away for 2 ln(n) / cohort rounds with a chance of 1 in n.
    """
    config = setup.settings.config
    away = 2 * math.log(config.clients) / config.cohort if config.cohort < 1 else 0
    versions = min(config.rounds, config.clients, 3 + math.ceil(away))
    return versions * sum(nbytes(setup.initial[part]) for part in setup.algorithm.holds if _is_shared(setup, part))


def _activation_bytes(setup: Setup, client: int) -> int:
    """Of one example's activations: both ends of the wire keep the last ones, if differences are coded."""
    each = setup.initial["client"]
    number = max(x.element_size() for x in each.values() if x.is_floating_point())
    sent = crossing_tensors(setup.held_by(client)["client"])
    count = sum(math.prod(tensor.shape) for tensor in sent if "float" in tensor.dtype)
    return count // EXAMPLES_TO_CUT * number

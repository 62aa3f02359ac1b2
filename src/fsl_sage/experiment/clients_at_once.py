"""What --clients-at-once can carry. All else is refused before a run starts, because some of it would go wrong quietly:
random numbers of one client for all, or a loss of all clients where an algorithm means one client's.
"""

from collections.abc import Iterator

from fsl_sage.algorithms import Algorithm, find_algorithm
from fsl_sage.config import Config
from fsl_sage.engines.base import Setup
from fsl_sage.engines.worker import Worker
from fsl_sage.errors import InputError, described
from fsl_sage.problems.base import Problem
from fsl_sage.reading import short
from fsl_sage.split import random_features

PLAYED_AS_ONE = ("fedavg", "cse-fsl", "fsl-sage", "local-loss")
"""Algorithms whose local rounds may be played once for several clients; so may those that derive from them and leave
the local round as it is."""


def check_options(config: Config, algorithm: Algorithm) -> None:
    """Refuse options that several clients cannot have as one."""
    if config.clients_at_once == 1:
        return
    for given, reason, instead in _obstacles(config, algorithm):
        raise _refusal(config, given, reason, instead)


def _obstacles(config: Config, algorithm: Algorithm) -> Iterator[tuple[str, str, str]]:
    """What was given, why that is an obstacle, and what to give instead, if anything but one client at once."""
    if config.engine != "local":
        yield f"--engine {config.engine}", "only the local engine stacks clients", "--engine local"
    if type(algorithm).local_round not in [find_algorithm(name).local_round for name in PLAYED_AS_ONE]:
        reason = f"its local round is a single client's; those of {', '.join(PLAYED_AS_ONE)} can be several clients'"
        yield f"--algorithm {config.algorithm}", reason, ""
    if any(algorithm.waits_in(t) for t in range(config.rounds)):
        yield "clients that wait", f"they wait for {algorithm.waits_for}", "--align-at end"
    if getattr(algorithm.options, "hold", 0):
        yield f"--hold {algorithm.options.hold:g}", "what holds a client is kept by client", "--hold 0"
    if algorithm.averaging.control_variates:
        yield "--averaging.control-variates", "the controls are kept by client", ""
    if algorithm.labels_stay:
        yield f"--model.cut {config.model.cut}", "a U-shape has a second part behind the cut", "one cut"
    if random_features(config.model.auxiliary) is not None:
        auxiliary = f"--model.auxiliary {config.model.auxiliary}"
        yield auxiliary, "its estimates have no loss", "--model.auxiliary blocks:1"
    if config.precision == "bf16":
        yield "--precision bf16", "stacks are not tested under autocast", "--precision float32"
    if config.on_client_failure == "drop":
        reason = "a failure in a group is that of all its clients"
        yield "--on-client-failure drop", reason, "--on-client-failure stop"


def check_model(setup: Setup, problem: Problem) -> None:
    """Refuse data and models that several clients cannot have as one. A step of two clients is tried."""
    config = setup.settings.config
    if config.clients_at_once == 1:
        return
    if problem.has_tokens or setup.settings.task.sizes_vary:
        raise _refusal(config, f"--data.name {config.data.name}", "batches of texts have different lengths")
    if setup.settings.draws:
        reason = "it draws random numbers in its forward pass (dropout), and each client has its own"
        raise _refusal(config, f"--model.name {config.model.name}", reason)
    try:
        Worker(setup).rehearse_as_one()
    except Exception as error:
        reason = f"torch.vmap cannot carry a step of it ({short(described(error), 300)})"
        raise _refusal(config, f"--model.name {config.model.name}", reason) from error


def _refusal(config: Config, given: str, reason: str, instead: str = "") -> InputError:
    option = f"--clients-at-once {config.clients_at_once}"
    other = f", or {instead}" if instead else ""
    return InputError(f"{option} cannot run with {given}: {reason}. Give --clients-at-once 1{other}.")

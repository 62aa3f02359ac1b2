"""The cut of each client, where clients have cuts of their own: as given, or planned by their memory."""

from collections.abc import Sequence
from functools import lru_cache
from warnings import warn

from torch import Tensor

from fsl_sage.algorithms import make_algorithm
from fsl_sage.config import Config
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.problems.base import Problem
from fsl_sage.problems.parts import META, build_model
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.split import Analysis, CutPoint, cut_points_of
from fsl_sage.units import bytes_text


def client_cuts(config: Config, problem: Problem, examples: Sequence[Tensor]) -> tuple[str, ...]:
    """The cut of each client; empty if all have the same."""
    algorithm = make_algorithm(config)
    if not algorithm.client_memories:
        return algorithm.client_cuts
    points = _points(config, problem)
    chosen = [
        _planned(client, memory, points, sum(local_batch_sizes(len(examples[client]), config)))
        for client, memory in enumerate(algorithm.client_memories)
    ]
    _say_once(tuple(chosen))
    return tuple(point.name for point in chosen)


def _points(config: Config, problem: Problem) -> list[CutPoint]:
    """The cuts with something to train on both sides."""
    model = build_model(config, problem, META)
    points = cut_points_of(Analysis(model, problem.largest_example(config.batch_size, META)))
    return [point for point in points if point.client_trainable_bytes and point.server_trainable_bytes]


def _planned(client: int, memory: float, points: Sequence[CutPoint], seen: int) -> CutPoint:
    """Of the cuts that fit a client's memory, the one at which it moves the fewest bytes in a round."""
    fitting = [point for point in points if point.client_memory <= memory]
    if not fitting:
        least = min(points, key=lambda point: point.client_memory)
        raise InputError(
            f"No cut fits the {bytes_text(memory)} of client {client}: a step needs at least "
            f"{bytes_text(least.client_memory)}, at {least.name}. A smaller --batch-size needs less."
        )
    return min(fitting, key=lambda point: (moved(point, seen), point.client_flops))


def moved(point: CutPoint, seen: int) -> int:
    """Bytes of a client in a round with so many examples: activations, their gradients, and its part."""
    return 2 * (seen * point.activation_bytes + point.client_bytes)


@lru_cache(maxsize=64)  # a setup is made several times, for example for its costs
def _say_once(chosen: tuple[CutPoint, ...]) -> None:
    places = [f"client {n} at {point.name} ({bytes_text(point.client_memory)})" for n, point in enumerate(chosen)]
    warn(f"Cuts planned by the clients' memories: {', '.join(places)}.", RunWarning, stacklevel=2)

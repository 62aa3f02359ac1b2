"""The cut of each client, where clients have cuts of their own: as given, or planned by their memory."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple
from warnings import warn

from torch import Tensor

from fsl_sage.algorithms import make_algorithm
from fsl_sage.config import Config
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.models import usual_auxiliary
from fsl_sage.problems.base import Problem
from fsl_sage.problems.parts import META, build_model
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.roles.footprint import Footprint
from fsl_sage.split import Analysis, AuxiliaryStates, CutPoint, cut_points_of
from fsl_sage.units import bytes_text


class Candidate(NamedTuple):
    """A cut, and what a client's step takes there."""

    point: CutPoint
    step: Footprint


def client_cuts(config: Config, problem: Problem, examples: Sequence[Tensor]) -> tuple[str, ...]:
    """The cut of each client; empty if all have the same."""
    algorithm = make_algorithm(config)
    if not algorithm.client_memories:
        return algorithm.client_cuts
    candidates = _candidates(config, problem)
    chosen = [
        _planned(client, memory, candidates, sum(local_batch_sizes(len(examples[client]), config)))
        for client, memory in enumerate(algorithm.client_memories)
    ]
    _say_once(tuple(chosen))
    return tuple(each.point.name for each in chosen)


def _candidates(config: Config, problem: Problem) -> list[Candidate]:
    """The cuts with something to train on both sides, planned as `fsl-sage cuts` plans them."""
    from fsl_sage.experiment.planning import Planner  # both make setups, which ask for cuts
    from fsl_sage.experiment.role_plan import plan_of

    model = build_model(config, problem, META)
    analysis = Analysis(model, problem.largest_example(config.batch_size, META))
    one_cut = replace(config, options=replace(config.options, client_memories=()))
    auxiliaries = AuxiliaryStates(analysis, config.model.auxiliary or usual_auxiliary(model))
    planner = Planner(one_cut, problem, analysis, auxiliaries)
    points = [
        point
        for point in cut_points_of(analysis, planner.step)
        if point.client_trainable_bytes and point.server_trainable_bytes
    ]
    # What the roles do is the same at every cut; a setup with one cut has an auxiliary, which not every cut allows.
    known = next((point.name for point in points if auxiliaries.allows(point.name)), points[0].name)
    plan = plan_of(one_cut, problem, known)
    return [Candidate(point, planner.at(plan, point.name)["client"]) for point in points]


def _planned(client: int, memory: float, candidates: Sequence[Candidate], seen: int) -> Candidate:
    """Of the cuts that fit a client's memory, the one at which it moves the fewest bytes in a round."""
    fitting = [each for each in candidates if each.step.memory <= memory]
    if not fitting:
        least = min(candidates, key=lambda each: each.step.memory)
        raise InputError(
            f"No cut fits the {bytes_text(memory)} of client {client}: a step needs at least "
            f"{bytes_text(least.step.memory)}, at {least.point.name}. A smaller --batch-size needs less."
        )
    return min(fitting, key=lambda each: (moved(each.point, seen), each.step.step_flops))


def moved(point: CutPoint, seen: int) -> int:
    """Bytes of a client in a round with so many examples: activations, their gradients, and its part."""
    return 2 * (seen * point.activation_bytes + point.client_bytes)


@lru_cache(maxsize=64)  # a setup is made several times, for example for its costs
def _say_once(chosen: tuple[Candidate, ...]) -> None:
    places = [f"client {n} at {each.point.name} ({bytes_text(each.step.memory)})" for n, each in enumerate(chosen)]
    warn(f"Cuts planned by the clients' memories: {', '.join(places)}.", RunWarning, stacklevel=2)

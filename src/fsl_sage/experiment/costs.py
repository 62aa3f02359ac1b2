"""What a round, a run and the parts of a model cost, known without training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fsl_sage.algorithms import ALGORITHMS, find_algorithm, make_algorithm
from fsl_sage.algorithms.options import as_algorithm, refuse_foreign
from fsl_sage.alignment.passes import Smash
from fsl_sage.config import Config, given_options
from fsl_sage.engines.base import Setup
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.dry_server import Shapes
from fsl_sage.errors import InputError
from fsl_sage.experiment.federation import Federation, draw_cohort
from fsl_sage.experiment.setup import make_dry_setup
from fsl_sage.models import mask_buffers
from fsl_sage.problems.base import Problem
from fsl_sage.wire.ledger import BEFORE, GIB, Ledger, totals


def cost(
    config: Config, problem: Problem | None = None, *, algorithms: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The bytes of a round of each algorithm, without training.

    It is a round whose clients all took part in the round before.

    Args:
        config: The run. Its algorithm matters only if it is one of your own.
        problem: The data, model and loss; if not given, those that the configuration names.
        algorithms: Names of algorithms; if not given, all of the package and the configuration's own. Algorithms that
            do not run with the configuration are left out.

    Returns:
        By algorithm a dict: `bytes_paper` (by the paper's convention), `bytes_total`, `bytes_whole_models`, `by_kind`,
        `bytes_first_download` (once, before round 0) and `is_upper_bound`. If some rounds align, `bytes_paper_aligning`
        and others that end in `_aligning` are those of such a round.
    """
    kinds = {**ALGORITHMS, config.algorithm: find_algorithm(config.algorithm)}
    refuse_foreign(given_options(config.options), kinds)
    wanted = {name: find_algorithm(name) for name in algorithms} or kinds
    smashed: dict[tuple[str, Shapes], Smash] = {}
    costs = {}
    refused: InputError | None = None
    for name in wanted:
        try:
            costs[name] = _cost(_as_algorithm(config, name), smashed, problem)
        except InputError as error:
            # An algorithm that cannot run with this configuration has no cost. Its own must run, except for a U-shape.
            if name == config.algorithm and len(config.model.cuts) != 2:
                raise
            refused = error
    if not costs and refused:
        raise refused
    return costs


def _as_algorithm(config: Config, name: str) -> Config:
    return replace(as_algorithm(config, name, find_algorithm(name).in_cost), rounds=2)


def _cost(config: Config, smashed: dict[tuple[str, Shapes], Smash], problem: Problem | None) -> dict[str, Any]:
    make_algorithm(config)  # refuses impossible options before anything slow
    setup = make_dry_setup(config, problem)
    federation = Federation(setup, DryEngine(setup, smashed))
    cohort = draw_cohort(config, 0)
    aligned, whole = [], []
    for t in range(2):
        before = federation.ledger.whole_models
        aligned.append(federation.play_round(t, cohort)["aligned"])
        whole.append(federation.ledger.whole_models - before)
    tables = [federation.ledger.by_kind(t) for t in range(2)]
    total, paper = totals(tables[1])
    result: dict[str, Any] = {"bytes_paper": paper, "bytes_total": total, "bytes_whole_models": whole[1]}
    result["by_kind"] = tables[1]
    if aligned[0]:
        total, paper = totals(tables[0])
        result |= {
            "bytes_paper_aligning": paper,
            "bytes_total_aligning": total,
            "bytes_whole_models_aligning": whole[0],
        }
        result["by_kind_aligning"] = tables[0]
    result["bytes_first_download"] = totals(federation.ledger.by_kind(BEFORE))[0]
    return {**result, "is_upper_bound": _is_bound(setup)}


def _is_bound(setup: Setup) -> bool:
    """Whether a run may send less: shorter texts, zstd, an alignment that is not needed or has no data."""
    settings, algorithm = setup.settings, setup.algorithm
    less = settings.task.sizes_are_bounds or settings.codecs.sizes_vary or algorithm.sends_less
    return less or (algorithm.reads("alignment.total_samples") and _crowds_out(settings.config))


def _crowds_out(config: Config) -> bool:
    """Whether clients' uploads may make room for others' until nothing is left to align their own auxiliaries by."""
    options = config.alignment
    if options.scope != "client":
        return False
    return options.tokens is not None or config.clients * options.samples > options.total_samples


def part_sizes(config: Config) -> dict[str, dict[str, int]]:
    """For each part of the model its parameters and buffers, how many of them are trained, and how many the paper has.

    `in_paper` differs for GPT-2 alone, whose older code held a causal mask in every block as a buffer.
    """
    modules = make_dry_setup(_as_algorithm(config, config.algorithm)).modules
    return {part: _part_size(module) for part, module in modules.items()}


def _part_size(module: nn.Module) -> dict[str, int]:
    tensors = {id(x): x for x in module.state_dict(keep_vars=True).values()}.values()
    count = sum(x.numel() for x in tensors)
    trained = sum(x.numel() for x in tensors if x.requires_grad)
    return {"parameters_and_buffers": count, "trained": trained, "in_paper": count + mask_buffers(module)}


def run_cost(config: Config) -> dict[str, int]:
    """Rounds and bytes of a whole run, without training. They are exact unless a target or a time limit ends it."""
    setup = make_dry_setup(config)
    federation = Federation(setup, DryEngine(setup))
    whole = len(draw_cohort(config, 0)) == config.clients
    alike = whole and (not setup.settings.task.sizes_vary or setup.settings.task.sizes_are_bounds)
    known: dict[Any, tuple[int, int, int]] = {}
    total = paper = models = rounds = 0
    while rounds < config.rounds and (config.budget_gib is None or paper < config.budget_gib * GIB):
        # Rounds in which the same parts and messages travel cost the same, so one of each sort is played.
        sort = _sort_of_round(federation, rounds) if alike and rounds else None
        if sort is None or sort not in known:
            before = _sums(federation.ledger)
            federation.play_round(rounds, draw_cohort(config, rounds))
            after = _sums(federation.ledger)
            known[sort] = after[0] - before[0], after[1] - before[1], after[2] - before[2]
        moved = known[sort]
        total, paper, models = total + moved[0], paper + moved[1], models + moved[2]
        rounds += 1
    bound = _is_bound(setup)
    sums = {"bytes_total": total, "bytes_paper": paper, "bytes_whole_models": models}
    return {"rounds": rounds, **sums, "is_upper_bound": bound}


def _sums(ledger: Ledger) -> tuple[int, int, int]:
    return ledger.total, ledger.paper, ledger.whole_models


def _sort_of_round(federation: Federation, t: int) -> tuple[Any, ...]:
    messages = federation.engine.server.end_of_round(t)
    sizes = tuple((client, tuple(message.sizes().items())) for client, message in messages)
    algorithm = federation.setup.algorithm
    return algorithm.averaged_in(t), algorithm.waits_in(t), sizes

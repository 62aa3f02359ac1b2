"""From a configuration and its problem to what an engine starts from: parts, weights, settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from fsl_sage.algorithms import make_algorithm
from fsl_sage.config import Config
from fsl_sage.devices import pick_device
from fsl_sage.engines.base import Setup
from fsl_sage.errors import InputError
from fsl_sage.models import MODELS, statistics_names
from fsl_sage.problems.base import Problem, example_shapes
from fsl_sage.problems.make import make_dry_problem, make_problem
from fsl_sage.problems.parts import META, build_decoder, build_held, build_parts
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.roles.f_server import client_weights
from fsl_sage.roles.replica import Slots
from fsl_sage.roles.work import Settings, draws_in_forward
from fsl_sage.split import SplitPlan


def check_config(config: Config) -> torch.device:
    """Refuse, before anything slow, what no problem can run with; returns the device."""
    make_algorithm(config).check()
    return pick_device(config.device)


def make_setup(config: Config, problem: Problem | None = None, counts: Sequence[int] | None = None) -> Setup:
    """Everything with its data and numbers.

    Args:
        config: What a run is given.
        problem: What is learnt; the configuration's own if not given.
        counts: For each client the number of its examples, where they are not all here (Flower). Each then knows its
            own by the numbers from 0 up.
    """
    device = check_config(config)
    problem = problem or make_problem(config)
    examples = problem.divide(config) if counts is None else [torch.arange(count) for count in counts]
    modules = _with_decoder(config, problem, build_parts(config, problem, device), device)
    _check_trained(config, modules)
    return _assemble(config, problem, modules, examples, device)


def make_dry_setup(config: Config, problem: Problem | None = None, counts: Sequence[int] | None = None) -> Setup:
    """Shapes only, for clients with so many examples each, if their numbers are given."""
    problem = problem or make_dry_problem(config)
    examples = problem.divide(config) if counts is None else example_shapes(counts)
    model_alone = replace(Config(), model=config.model, lora=config.lora, precision=config.precision)
    modules = _shape_parts(model_alone, problem, MODELS.get(config.model.name))
    modules = _with_decoder(config, problem, modules, META)
    return _assemble(config, problem, modules, examples, META)


def make_site_setup(
    config: Config,
    problem: Problem,
    counts: Sequence[int],
    plan: SplitPlan,
    put_in: Callable[[Mapping[str, nn.Module], torch.device], None],
) -> Setup:
    """What the client of a site starts from: the parts that it holds, and nothing of the others.

    Args:
        config: What the run is given.
        problem: The site's own examples.
        counts: For each client the number of its examples.
        plan: Where the server has cut the model.
        put_in: Puts the fixed tensors into the parts.

    The weights in `initial` are shapes: they come with the site's messages.
    """
    device = check_config(config)
    examples = [torch.arange(count) for count in counts]
    modules = build_held(config, problem, plan, make_algorithm(config).holds, device)
    modules = _with_decoder(config, problem, modules, META)
    put_in(modules, device)
    return _assemble(config, problem, modules, examples, device)


def check_structure(setup: Setup, shapes: Setup) -> None:
    """Refuse a model whose parts are others when they are built without weights, as sites build them."""
    for part, tensors in setup.initial.items():
        with_data, without = ({n: x.shape for n, x in own.items()} for own in (tensors, shapes.initial[part]))
        if with_data != without:
            names = sorted(name for name in {**with_data, **without} if with_data.get(name) != without.get(name))
            raise InputError(
                f"The {part} part of {setup.settings.config.model.name} is another one when it is built on torch's "
                f"meta device, as sites do: {names[0]} differs. Its constructor must not depend on weights' values."
            )


@lru_cache(maxsize=16)  # the same for all algorithms and partitions that `cost` or a grid asks for
def _shape_parts(config: Config, problem: Problem, factory: object) -> dict[str, nn.Module]:
    return build_parts(config, problem, META)


def _with_decoder(
    config: Config, problem: Problem, modules: dict[str, nn.Module], device: torch.device
) -> dict[str, nn.Module]:
    """The parts, and a decoder for the algorithm that has one."""
    if "decoder" not in make_algorithm(config).holds:
        return modules
    return {**modules, "decoder": build_decoder(config, problem, modules["client"], device)}


def _assemble(
    config: Config, problem: Problem, modules: dict[str, nn.Module], examples: list[Tensor], device: torch.device
) -> Setup:
    """A setup of its pieces: what follows from them is the same on every engine."""
    counts = [len(indices) for indices in examples]
    algorithm = make_algorithm(config)
    config = replace(config, averaging=algorithm.averaging)
    settings = Settings(
        config,
        problem.make_task(config, device),
        device,
        steps=max(len(local_batch_sizes(count, config)) for count in counts),
        draws=any(draws_in_forward(module) for module in modules.values()),
        stays_local=_stays_local(config, modules),
    )
    initial = {part: Slots(module).tensors() for part, module in modules.items()}
    weights = client_weights(config.averaging.weighting, counts)
    return Setup(settings, algorithm, modules, initial, examples, weights)


def _check_trained(config: Config, modules: dict[str, nn.Module]) -> None:
    for part, module in modules.items():
        if not any(parameter.requires_grad for parameter in module.parameters()):
            where = f"--model.cut {config.model.cut}" if config.model.cut else "its usual cut"
            raise InputError(f"The {part} part of {config.model.name} has nothing to train at {where}: cut elsewhere.")


def _stays_local(config: Config, modules: dict[str, nn.Module]) -> dict[str, frozenset[str]]:
    if config.model.batch_norm != "local":
        return {}
    return {part: frozenset(statistics_names(module)) for part, module in modules.items()}

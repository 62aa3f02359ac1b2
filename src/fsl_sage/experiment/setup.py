"""From a configuration and its problem to what an engine starts from: parts, weights, settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from fsl_sage.algorithms import Algorithm, make_algorithm
from fsl_sage.config import AlignmentConfig, Config, brings_modules
from fsl_sage.devices import pick_device
from fsl_sage.engines.base import Setup
from fsl_sage.engines.process import prepare_device
from fsl_sage.errors import InputError
from fsl_sage.experiment.client_cuts import client_cuts
from fsl_sage.experiment.clients_at_once import check_model, check_options
from fsl_sage.models import MODELS, statistics_names
from fsl_sage.problems.base import Problem, example_shapes
from fsl_sage.problems.make import make_dry_problem, make_problem
from fsl_sage.problems.parts import EXAMPLES_TO_CUT, META, build_decoder, build_held, build_parts, build_parts_at
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.roles.f_server import client_weights
from fsl_sage.roles.replica import Slots
from fsl_sage.roles.trial import hidden_state, moves_generators
from fsl_sage.roles.work import Settings, draws_in_forward
from fsl_sage.split import SplitPlan, crossing_tensors
from fsl_sage.wire.codecs import Codecs


def check_config(config: Config) -> torch.device:
    """Refuse impossible options before anything slow; returns the device."""
    algorithm = make_algorithm(config)
    algorithm.check()
    check_options(config, algorithm)
    return pick_device(config.device)


def make_setup(config: Config, problem: Problem | None = None, counts: Sequence[int] | None = None) -> Setup:
    """The setup of a run, with its data and its initial weights.

    Args:
        config: What a run is given.
        problem: What is learnt; the configuration's own if not given.
        counts: For each client the number of its examples, where they are not all here (Flower). Each then knows its
            own by the numbers from 0 up.
    """
    device = prepare_device(check_config(config))
    problem = problem or make_problem(config)
    examples = problem.divide(config) if counts is None else [torch.arange(count) for count in counts]
    if cuts := client_cuts(config, problem, examples):
        at_cut = build_parts_at(cuts, config, problem, device)
        for cut, parts in at_cut.items():
            _check_trained(config, parts, cut)
        return _assemble(config, problem, _deepest(at_cut), examples, device, cuts, at_cut)
    modules = build_parts(_as_read(config), problem, device, needs_auxiliary=_has_auxiliary(config))
    modules = _with_decoder(config, problem, modules, device)
    _check_trained(config, modules)
    _check_uploads(config, modules["client"])
    setup = _assemble(config, problem, modules, examples, device)
    check_model(setup, problem)
    return setup


def make_dry_setup(config: Config, problem: Problem | None = None, counts: Sequence[int] | None = None) -> Setup:
    """As `make_setup`, with shapes only. `counts` are the clients' numbers of examples, if they are known."""
    problem = problem or make_dry_problem(config)
    examples = problem.divide(config) if counts is None else example_shapes(counts)
    alignment = replace(AlignmentConfig(), loss=_as_read(config).alignment.loss)
    model_alone = replace(
        Config(), model=config.model, lora=config.lora, precision=config.precision, alignment=alignment
    )
    if cuts := client_cuts(config, problem, examples):
        at_cut = build_parts_at(cuts, model_alone, problem, META)
        return _assemble(config, problem, _deepest(at_cut), examples, META, cuts, at_cut)
    modules = _shape_parts(model_alone, problem, MODELS.get(config.model.name), _has_auxiliary(config))
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
    device = prepare_device(check_config(config))
    examples = [torch.arange(count) for count in counts]
    modules = build_held(_as_read(config), problem, plan, make_algorithm(config).holds, device)
    modules = _with_decoder(config, problem, modules, META)
    put_in(modules, device)
    return _assemble(config, problem, modules, examples, device)


def check_structure(setup: Setup, shapes: Setup) -> None:
    """Refuse a model whose parts differ when they are built without weights, as sites build them."""
    for part, tensors in setup.initial.items():
        with_data, without = ({n: x.shape for n, x in own.items()} for own in (tensors, shapes.initial[part]))
        if with_data != without:
            names = sorted(name for name in {**with_data, **without} if with_data.get(name) != without.get(name))
            raise InputError(
                f"The {part} part of {setup.settings.config.model.name} is another one when it is built on torch's "
                f"meta device, as sites do: {names[0]} differs. Its constructor must not depend on weights' values."
            )


@lru_cache(maxsize=16)  # the same for all algorithms and partitions that `cost` or a grid asks for
def _shape_parts(config: Config, problem: Problem, factory: object, needs_auxiliary: bool) -> dict[str, nn.Module]:
    return build_parts(config, problem, META, needs_auxiliary=needs_auxiliary)


def _has_auxiliary(config: Config) -> bool:
    return "auxiliary" in make_algorithm(config).holds


def _with_decoder(
    config: Config, problem: Problem, modules: dict[str, nn.Module], device: torch.device
) -> dict[str, nn.Module]:
    """The parts, and a decoder for the algorithm that has one."""
    if "decoder" not in make_algorithm(config).holds:
        return modules
    return {**modules, "decoder": build_decoder(config, problem, modules["client"], device)}


def _as_read(config: Config) -> Config:
    """The configuration as the parts are built by it: an alignment's loss is for algorithms that align."""
    if make_algorithm(config).reads("alignment.loss"):
        return config
    return replace(config, alignment=replace(config.alignment, loss="squared"))


PartsAtCuts = dict[str, dict[str, nn.Module]]
"""By cut, from the shallowest to the deepest: client and server part."""


def _deepest(at_cut: PartsAtCuts) -> dict[str, nn.Module]:
    return list(at_cut.values())[-1]


def _assemble(
    config: Config,
    problem: Problem,
    modules: dict[str, nn.Module],
    examples: list[Tensor],
    device: torch.device,
    cuts: tuple[str, ...] = (),
    at_cut: PartsAtCuts | None = None,
) -> Setup:
    """A setup from its pieces, the same for every engine."""
    counts = [len(indices) for indices in examples]
    algorithm = make_algorithm(config)
    config = replace(config, averaging=algorithm.averaging)
    slots = {part: Slots(module) for part, module in modules.items()}
    task = problem.make_task(config, device)
    settings = Settings(
        config,
        task,
        device,
        steps=max(len(local_batch_sizes(count, config)) for count in counts),
        draws=_draws(config, problem, modules, device),
        stays_local=_stays_local(config, modules),
        codecs=Codecs(config.codec, config.seed, task.label_values),
        trained={part: frozenset(own.trainable) for part, own in slots.items()},
    )
    initial = {part: own.tensors() for part, own in slots.items()}
    weights = client_weights(config.averaging.weighting, counts)
    return Setup(settings, algorithm, modules, initial, examples, weights, cuts, at_cut or {})


def _draws(config: Config, problem: Problem, modules: dict[str, nn.Module], device: torch.device) -> bool:
    """Whether training draws random numbers in forward passes; of models of the user's own a pass tells."""
    drawn = any(draws_in_forward(module) for module in modules.values())
    if device.type == "meta" or not brings_modules(config):
        return drawn
    if not {"client", "server"} <= modules.keys():
        return True  # at a site, which cannot try a whole pass: seeds that nobody needs change no number
    parts = [modules[part] for part in ("client", "server", "head") if part in modules]
    example = problem.largest_example(2, device)
    if (found := hidden_state(parts, example, device)) is not None:
        raise InputError(
            f"{config.model.name} keeps something from one training pass to the next that is not in its state_dict, so "
            f"clients would share it and a resumed run would lose it: {found}."
        )
    return drawn or moves_generators(parts, example, device)


def _check_trained(config: Config, modules: dict[str, nn.Module], cut: str | None = None) -> None:
    for part, module in modules.items():
        if not any(parameter.requires_grad for parameter in module.parameters()):
            where = cut or (f"--model.cut {config.model.cut}" if config.model.cut else "its usual cut")
            raise InputError(f"The {part} part of {config.model.name} has nothing to train at {where}: cut elsewhere.")


def _check_uploads(config: Config, client: nn.Module) -> None:
    """Refuse an array for a whole batch where uploads are cut and put together: it has no samples."""
    algorithm = make_algorithm(config)
    if not algorithm.stores_uploads and type(algorithm).on_uploads is Algorithm.on_uploads:
        return
    for tensor in crossing_tensors(client):
        if not tensor.batched:
            freeze = f"freeze it by --model.frozen {tensor.module}, or " if tensor.module else ""
            raise InputError(
                f"{config.model.name} sends '{tensor.name}' across the cut once for a whole batch, so the samples of "
                f"an upload cannot be told apart, as {algorithm.title} must: {freeze}cut elsewhere."
            )
        if algorithm.stores_uploads and (rows := tensor.shape[0] // EXAMPLES_TO_CUT) != 1:
            raise InputError(
                f"{config.model.name} sends '{tensor.name}' across the cut with {rows} rows for each sample in its "
                f"first dimension, so the samples of an upload cannot be told apart, as {algorithm.title} must: let "
                "the module at the cut return [samples, rows, ...], or cut elsewhere."
            )


def _stays_local(config: Config, modules: dict[str, nn.Module]) -> dict[str, frozenset[str]]:
    if config.model.batch_norm != "local":
        return {}
    return {part: frozenset(statistics_names(module)) for part, module in modules.items()}

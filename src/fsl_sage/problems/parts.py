"""The model of a problem and its parts."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from fsl_sage.config import Config
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.models import (
    Decoder,
    batch_statistics,
    input_embedding,
    is_language_model,
    replace_batch_norm,
    train_auxiliary,
    usual_auxiliary,
)
from fsl_sage.models.modes import pin_evaluation
from fsl_sage.precision import dtype_of, with_precision
from fsl_sage.problems.base import Problem
from fsl_sage.seeding import derive
from fsl_sage.split import (
    Analysis,
    BoundaryTensor,
    Part,
    Ridge,
    Split,
    SplitError,
    SplitPlan,
    add_fitted_scale,
    auxiliary,
    boundary_shapes,
    passage,
    random_features,
    split_model,
)
from fsl_sage.split.trace.skeleton import built_on_meta

META = torch.device("meta")
EXAMPLES_TO_CUT = 2
"""The batch on which a model is run to cut it."""
SHOWN = 8
"""Cuts that an error names as examples."""


def build_model(config: Config, problem: Problem, device: torch.device) -> nn.Module:
    """The unsplit model with its initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "model"))

        def make() -> nn.Module:
            made = problem.make_model(config)
            return replace_batch_norm(made) if config.model.batch_norm == "group" else made

        if device == META:
            model = built_on_meta(make)
        else:
            # Drawn on the CPU whatever the device, so that every device starts from the same weights.
            with torch.device("cpu"):
                model = make()
    _freeze(model, config.model.frozen)
    _refuse_complex(model)
    pin_evaluation(model)
    return model


def _refuse_complex(model: nn.Module) -> None:
    """Averages, optimizers and codecs take real numbers."""
    name = next((name for name, tensor in model.state_dict().items() if tensor.is_complex()), None)
    if name is not None:
        raise InputError(
            f"'{name}' of the model holds complex numbers: keep it as real ones, [..., 2], and make them complex where "
            "they are used, by torch.view_as_complex."
        )


def _freeze(model: nn.Module, names: Iterable[str]) -> None:
    """Let these modules, or single weights, stay as they are."""
    for name in names:
        found = [weight for path, weight in model.named_parameters() if f"{path}.".startswith(f"{name}.")]
        if not found:
            top = ", ".join(child for child, _ in model.named_children())
            raise InputError(
                f"--model.frozen {name} names no weights of the model: give the names of modules in {top}."
            )
        for weight in found:
            weight.requires_grad_(False)


def build_parts(
    config: Config, problem: Problem, device: torch.device, *, needs_auxiliary: bool = True
) -> dict[str, nn.Module]:
    """The model, cut in two, and the auxiliary; without it where none is needed and the cut allows none."""
    return cut_model(config, problem, build_model(config, problem, device), device, needs_auxiliary=needs_auxiliary)


def cut_model(
    config: Config, problem: Problem, model: nn.Module, device: torch.device, *, needs_auxiliary: bool = True
) -> dict[str, nn.Module]:
    """The parts of a model that is built; they hold its tensors."""
    example = problem.example(EXAMPLES_TO_CUT, META if device == META else "cpu")
    split = split_model(model, _cut(config, problem, model, example), example)
    # Drawn and split in float32 whatever the precision, so that every precision starts from the same weights.
    there = (dtype_of(config.precision), device)
    if len(config.model.cuts) == 2:  # a U-shape has no auxiliary: its server does not compute the loss
        return {name: with_precision(part, *there) for name, part in zip(split.plan.parts, split.parts, strict=True)}
    parts: dict[str, nn.Module] = {"client": split.client, "server": split.server}
    try:
        parts["auxiliary"] = _estimator(config, problem, model, split, aligned=device != META)
    except SplitError:
        if needs_auxiliary:
            raise
    return {part: with_precision(module, *there) for part, module in parts.items()}


def build_parts_at(
    cuts: Iterable[str], config: Config, problem: Problem, device: torch.device
) -> dict[str, dict[str, nn.Module]]:
    """By cut, client and server part of the same model, from the shallowest cut to the deepest."""
    model = build_model(config, problem, device)
    example = problem.example(EXAMPLES_TO_CUT, META if device == META else "cpu")
    if any(not weight.requires_grad for weight in model.parameters()):
        raise InputError("A cut for each client needs a model whose weights are all trained: give --model.cut instead.")
    there = (dtype_of(config.precision), device)
    splits = {cut: split_model(model, cut, example) for cut in dict.fromkeys(cuts)}
    parts: dict[str, dict[str, nn.Module]] = {
        cut: {"client": with_precision(split.client, *there), "server": with_precision(split.server, *there)}
        for cut, split in splits.items()
    }
    return dict(sorted(parts.items(), key=lambda item: len(item[1]["client"].state_dict())))


def build_held(
    config: Config, problem: Problem, plan: SplitPlan, holds: Sequence[str], device: torch.device
) -> dict[str, nn.Module]:
    """The parts that a role holds, by the plan of a split, without the weights of any part.

    The parameters and buffers that are trained or averaged stay on the meta device: a role's replica brings them. So do
    the fixed tensors, which `set_fixed` puts in.
    """
    model = build_model(config, problem, META)
    split = Split(model, plan)
    parts: dict[str, nn.Module] = dict(zip(plan.parts, split.parts, strict=True))
    if "auxiliary" in holds:
        parts["auxiliary"] = _estimator(config, problem, model, split, aligned=False)
    dtype = dtype_of(config.precision)
    held = {name: with_precision(parts[name], dtype) for name in holds if name in parts}
    for part in held.values():
        if isinstance(part, Part):
            passage(part).apply_to_absent(lambda absent: absent.to(device))
    return held


def _estimator(config: Config, problem: Problem, model: nn.Module, split: Split, *, aligned: bool) -> nn.Module:
    """The auxiliary that the configuration asks for."""
    if random_features(config.model.auxiliary) is not None:
        return make_ridge(config, problem, model, split.plan.cuts[0].tensors)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "auxiliary"))
        estimator = auxiliary(split, config.model.auxiliary or usual_auxiliary(model), aligned=aligned)
    if is_language_model(model):
        train_auxiliary(estimator, model, config.lora)
    if config.alignment.loss == "cosine":
        add_fitted_scale(estimator)
    return estimator


def make_ridge(config: Config, problem: Problem, model: nn.Module, boundary: Sequence[BoundaryTensor]) -> Ridge:
    """The ridge auxiliary behind a cut."""
    random = random_features(config.model.auxiliary) or 0
    if is_language_model(model):
        return Ridge(boundary, embedding=input_embedding(model), random=random, seed=config.seed)
    values = problem.make_task(config, META).label_values
    return Ridge(boundary, values=values, random=random, seed=config.seed)


def build_decoder(config: Config, problem: Problem, client: nn.Module, device: torch.device) -> nn.Module:
    """From what the client part gives back to its inputs: for images, cut where there are still maps."""
    example = problem.example(EXAMPLES_TO_CUT, device)
    if not isinstance(example, Tensor):
        raise InputError(f"{config.algorithm} cannot decode the inputs of {problem.name}: give --no-decoder.")
    with batch_statistics(client):
        z = boundary_shapes(client, example.to(dtype_of(config.precision)))
    if len(z) != 1 or z[0].ndim != 4 or example.ndim != 4:
        shapes = ", ".join(str(list(tensor.shape[1:])) for tensor in z)
        raise InputError(
            f"{config.algorithm} has no decoder from {shapes} to inputs of {list(example.shape[1:])}: cut where the "
            "client part gives one image of some channels, or give --no-decoder."
        )
    with torch.random.fork_rng(devices=[]), torch.device(META if device == META else "cpu"):
        torch.manual_seed(derive(config.seed, "decoder"))
        decoder = Decoder(z[0].shape[1], example.shape[1], (example.shape[2], example.shape[3]))
    return decoder.to(device=device, dtype=dtype_of(config.precision))


def _cut(config: Config, problem: Problem, model: nn.Module, example: Any) -> str | tuple[str, str]:
    if len(config.model.cuts) == 2:
        first, second = config.model.cuts
        return first, second
    cut = config.model.cut or problem.usual_cut(config, model)
    if cut is None:
        analysis = Analysis(model, example)
        names = analysis.cut_names
        cut = end_of_first_block(model, names)
        if not names:
            raise InputError(f"{config.model.name} cannot be cut anywhere: {analysis.why_nowhere()}.")
        if cut is None:
            raise InputError(
                f"{config.model.name} has no usual cut: give --model.cut, such as {', '.join(names[:SHOWN])}; "
                "'fsl-sage cuts' shows all and what they cost."
            )
        _say_once(f"{config.model.name} is cut after its first block, {cut}; --model.cut chooses another cut.")
    return cut


def end_of_first_block(model: nn.Module, names: Sequence[str]) -> str | None:
    """The first of these cuts that ends a block: the first of several modules in a row that have modules inside."""
    for name in names:
        holder, _, place = name.rpartition(".")
        row = list(model.get_submodule(holder).children())
        if place == "0" and len(row) > 1 and any(True for _ in row[0].children()):
            return name
    return None


@lru_cache(maxsize=64)  # the parts of a model are built several times, for example for its costs
def _say_once(said: str) -> None:
    warn(said, RunWarning, stacklevel=2)

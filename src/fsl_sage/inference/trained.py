"""The model of a run, with what it needs besides its weights."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from fsl_sage.algorithms.names import known_algorithm
from fsl_sage.config import Config
from fsl_sage.devices import pick_device
from fsl_sage.errors import InputError
from fsl_sage.precision import dtype_of, with_precision
from fsl_sage.problems.base import Problem
from fsl_sage.problems.images.images import ImageTerms
from fsl_sage.problems.make import problem_of_model
from fsl_sage.problems.parts import build_model
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.wire.message import Tensors


@dataclass(frozen=True)
class Trained:
    """A model that a run has trained."""

    directory: Path
    config: Config
    model: nn.Module
    """The ordinary unsplit model with the trained weights, in evaluation mode."""
    terms: ImageTerms | None
    """For images: how they are normalised and what the classes are; None where the run was on something else."""


def load_trained(run: Path | str, *, best: bool = False, problem: Problem | None = None) -> Trained:
    """The model of a run directory.

    Args:
        run: The run's directory.
        best: The model of the best round, which a run with `keep="best"` has, in the place of the last one's.
        problem: The problem that the run was started with, if one was given.
    """
    directory = RunDirectory(Path(run))
    config = directory.config()
    if (kind := known_algorithm(config.algorithm)) is not None and kind.own_parts:
        raise InputError(
            f"{directory.path} has no model of its own: with {config.algorithm} each client keeps its part, and "
            f"{directory.model_file.name} has them all, as clients/NUMBER/PART."
        )
    weights = _weights(directory, best)
    terms = directory.inference()
    with directory.from_its_folder():
        model = build_model(config, problem or problem_of_model(config, terms), pick_device("cpu"))
    with_precision(model, dtype_of(config.precision))
    _load(model, weights, config, directory.path)
    return Trained(directory.path, config, model.eval(), ImageTerms.of(terms))


def load_model(run: Path | str, *, best: bool = False, problem: Problem | None = None) -> nn.Module:
    """The trained model of a run directory: the ordinary unsplit module in evaluation mode, on the CPU.

    Images must be normalised as in training: `load_trained(run).terms.normalise` does it.

    Args:
        run: The run's directory.
        best: Take the model of the best round, which a run with `keep="best"` has, instead of the last one's.
        problem: The problem that the run was started with, if one was given.
    """
    return load_trained(run, best=best, problem=problem).model


def _weights(directory: RunDirectory, best: bool) -> Tensors:
    """The weights that a run has kept; the best ones must be of the round that its result names."""
    file = _weights_file(directory, best)
    weights, values = load_tensors(file)
    named = (directory.result() or {}).get("best_round") if best else None
    if named is not None and values != {"round": named}:
        raise InputError(
            f"{file} is not the model of round {named}, which {directory.result_file} names as the best: put that "
            "one back, or take the last model."
        )
    return weights


def _weights_file(directory: RunDirectory, best: bool) -> Path:
    file = directory.best_file if best else directory.model_file
    if file.exists():
        return file
    if best:
        raise InputError(f"{directory.path} has no {file.name}: only a run with --keep best keeps its best model.")
    raise InputError(f"{directory.path} is not finished: resume it with '{directory.resuming}'.")


def _load(model: nn.Module, weights: Mapping[str, Tensor], config: Config, path: Path) -> None:
    """Put the weights in. A run keeps what it trained: weights that were frozen are the model's own."""
    try:
        left = model.load_state_dict(dict(weights), strict=False)
    except RuntimeError as error:
        reason = str(error).split("\n")[1 if "\n" in str(error) else 0].strip()
        raise InputError(f"The weights in {path} do not fit {config.model.name}: {reason}") from None
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    missing = set(left.missing_keys) - frozen - _tied_to(model, weights)
    if missing or left.unexpected_keys:
        name = sorted(missing or left.unexpected_keys)[0]
        raise InputError(f"The weights in {path} do not fit {config.model.name}: '{name}' is in one of them alone.")


def _tied_to(model: nn.Module, names: Collection[str]) -> set[str]:
    """Other names of the weights and buffers that have these: a run keeps one that is tied under one of them."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    held = {id(tensors[name]) for name in names if name in tensors}
    return {name for name, tensor in tensors.items() if id(tensor) in held}

"""From a configuration to its problem: one way for all engines. Only here is asked what kind of data a name means."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from fsl_sage.config import DEFAULTS, Config, DataConfig, ModelConfig, option
from fsl_sage.errors import InputError
from fsl_sage.models import check_model_name
from fsl_sage.own_modules import import_own, is_own
from fsl_sage.problems.base import Problem
from fsl_sage.problems.images.folder import folder_defaults
from fsl_sage.problems.images.images import ImageTerms
from fsl_sage.problems.images.problem import ImageProblem, image_shapes, known_image_sizes, load_image_problem
from fsl_sage.problems.images.sources import check_image_name
from fsl_sage.problems.score import Score
from fsl_sage.problems.tensors import TensorProblem
from fsl_sage.problems.texts.labelled import LabelledTextProblem
from fsl_sage.problems.texts.problem import TextProblem
from fsl_sage.problems.texts.sources import defaults_of_texts, kind_of_texts, known_texts, load_texts
from fsl_sage.problems.texts.texts import KNOWN_TEXTS

DEFAULTS.update(dict.fromkeys([*KNOWN_TEXTS, "imdb", "jsonl:", "datasets:"], defaults_of_texts))
DEFAULTS["folder:"] = folder_defaults


def make_problem(config: Config) -> Problem:
    """The problem that a configuration names by `data` and `model`, with its data loaded."""
    kind = _check(config)
    if kind is None:
        return _own_problem(config)
    return load_image_problem(config) if kind is ImageProblem else load_texts(config)


def make_dry_problem(config: Config) -> Problem:
    """Shapes only; reads the data only where their sizes are not known and it is there."""
    kind = _check(config)
    if kind is None:
        # What `cost` and a grid vary is left out, so that one problem serves them all.
        return _own_once(replace(config, algorithm=Config.algorithm, options=None, rounds=Config.rounds, out=None))
    if kind is not ImageProblem:
        return known_texts(config) or _load_once(config.data, config.model, config.seed)
    return image_shapes(known_image_sizes(config) or _loaded_images(config).sizes)


def problem_of_model(config: Config, inference: Mapping[str, Any]) -> Problem:
    """The problem of a run as far as its model needs it, without its data where that is possible.

    Args:
        config: The run's configuration.
        inference: What `Problem.inference` gave when the run was played; may be empty.
    """
    terms = ImageTerms.of(inference)
    if terms is not None:
        return image_shapes(terms.sizes(train=2, test=1))
    return make_dry_problem(config)


def _loaded_images(config: Config) -> ImageProblem:
    problem = _load_once(config.data, ModelConfig(), config.seed)
    assert isinstance(problem, ImageProblem)
    return problem


@lru_cache(maxsize=1)  # the same for all algorithms that `cost` asks for
def _load_once(data: DataConfig, model: ModelConfig, seed: int) -> Problem:
    return make_problem(replace(Config(), data=data, model=model, seed=seed))


@lru_cache(maxsize=1)
def _own_once(config: Config) -> Problem:
    return _own_problem(config)


def _own_problem(config: Config) -> Problem:
    """What MODULE:FACTORY gives: a problem of the user's own. It is called with the configuration if it takes one."""
    name = config.data.name
    factory = import_own(name, "--data.name")
    if not callable(factory):
        raise InputError(f"--data.name {name} is not a Problem, nor a function that makes one.")
    if _takes_config(factory):
        problem = factory(config=config)
    else:
        _refuse_unread(config)
        problem = factory()
        if isinstance(problem, TensorProblem):
            problem.refuse_unread(config)
    if not isinstance(problem, Problem):
        raise InputError(f"--data.name {name} gave a {type(problem).__name__}; it must give a fsl_sage.Problem.")
    problem.check(config)
    return problem


_ALWAYS_READ = ("name", "dir", "partition", "alpha", "shards_per_client")
"""The options of data that a problem of any kind goes by."""


def _refuse_unread(config: Config) -> None:
    """Refuse options of data that a function without the configuration cannot read."""
    for field in fields(DataConfig):
        value = getattr(config.data, field.name)
        if field.name not in _ALWAYS_READ and value != field.default:
            raise InputError(
                f"{option(f'data.{field.name}')} {value} has no effect: {config.data.name} makes its data without it. "
                "A function that takes `config` may read it."
            )


def _takes_config(factory: Callable[..., Any]) -> bool:
    try:
        return "config" in inspect.signature(factory).parameters
    except ValueError:  # a function that is not written in Python
        return False


def named(config: Config) -> Config:
    """The configuration with the name that a problem of the user's own, MODULE:FACTORY, gives its model."""
    if _kind(config) is not None:
        return config
    return make_dry_problem(config).with_its_model(config)


def is_text(config: Config) -> bool:
    """Whether a language model learns to write what a meaning representation says: texts of E2E."""
    return config.data.name in KNOWN_TEXTS


def are_texts(config: Config) -> bool:
    """Whether the examples are texts, to write or to classify."""
    return kind_of_texts(config.data.name) is not None


def score_of(config: Config) -> Score:
    """The headline score of the problem that a configuration names; the data of known kinds is not read for it."""
    return (_kind(config) or make_dry_problem(config)).score


def _kind(config: Config) -> type[Problem] | None:
    """The class of the problem; None for one of the user's own."""
    if is_own(config.data.name) and not config.data.name.startswith("csv:"):  # which nobody means as Python's module
        return None
    kind = kind_of_texts(config.data.name)
    if kind is not None:
        return TextProblem if kind == "prompts" else LabelledTextProblem
    check_image_name(config.data.name)
    return ImageProblem


def _check(config: Config) -> type[Problem] | None:
    """Refuse, before anything slow, what this kind of problem cannot have; returns its class."""
    kind = _kind(config)
    if kind is not None:
        check_model_name(config.model.name)
        kind.check(config)
    return kind

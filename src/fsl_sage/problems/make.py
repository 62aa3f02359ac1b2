"""From a configuration to its problem: one way for all engines. Only here is asked what kind of data a name means."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fsl_sage.config import DEFAULTS, Config, DataConfig, ModelConfig
from fsl_sage.errors import InputError
from fsl_sage.models import check_model_name
from fsl_sage.problems.base import Problem
from fsl_sage.problems.images.images import ImageTerms, Sizes
from fsl_sage.problems.images.problem import ImageProblem, image_shapes, known_image_sizes, load_image_problem
from fsl_sage.problems.score import Score
from fsl_sage.problems.texts.problem import TextProblem, known_text_sizes, load_text_problem, text_defaults
from fsl_sage.problems.texts.texts import KNOWN_TEXTS, TextSizes

DEFAULTS.update(dict.fromkeys(KNOWN_TEXTS, text_defaults))


def make_problem(config: Config) -> Problem:
    """The problem that a configuration names, with its data."""
    _check(config)
    return load_text_problem(config) if is_text(config) else load_image_problem(config)


def make_dry_problem(config: Config) -> Problem:
    """Shapes only; reads the data only where their sizes are not known and it is there."""
    _check(config)
    if is_text(config):
        sizes = known_text_sizes(config)
        return _load_once(config.data, config.model.name, config.seed) if sizes is None else TextProblem(None, sizes)
    return image_shapes(known_image_sizes(config) or _image_sizes(config))


def problem_of_model(config: Config, inference: Mapping[str, Any]) -> Problem:
    """The problem of a run as far as its model needs it, without its data where that is possible.

    Args:
        config: The run's configuration.
        inference: What `Problem.inference` gave when the run was played; may be empty.
    """
    terms = ImageTerms.of(inference)
    if terms is not None:
        return image_shapes(terms.sizes(train=2, test=1))
    if is_text(config):
        return TextProblem(None, TextSizes(*KNOWN_TEXTS[config.data.name], config.data.sequence_length))
    return make_problem(config)


def _image_sizes(config: Config) -> Sizes:
    problem = _load_once(config.data, config.model.name, config.seed)
    assert isinstance(problem, ImageProblem)
    return problem.data.sizes


@lru_cache(maxsize=1)  # the same for all algorithms that `cost` asks for
def _load_once(data: DataConfig, model: str, seed: int) -> Problem:
    return make_problem(replace(Config(), data=data, model=ModelConfig(name=model), seed=seed))


def is_text(config: Config) -> bool:
    """Whether a language model learns to write."""
    return config.data.name in KNOWN_TEXTS


def score_of(config: Config) -> Score:
    """The headline score of the problem that a configuration names, known without its data."""
    return _kind(config).score


def _kind(config: Config) -> type[Problem]:
    return TextProblem if is_text(config) else ImageProblem


def _check(config: Config) -> None:
    """Refuse, before anything slow, what this kind of problem cannot have."""
    kind, colon, _ = config.data.name.partition(":")
    if colon and kind != "npz":
        raise InputError(
            f"{config.data.name} is a problem of one's own, which no option makes: give it to run and resume as "
            "problem=…, in Python."
        )
    check_model_name(config.model.name)
    _kind(config).check(config)

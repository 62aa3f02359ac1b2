"""From the options that are given to the algorithm's own."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, replace
from types import MappingProxyType
from typing import Any, get_type_hints

from fsl_sage.algorithms.base import Algorithm
from fsl_sage.algorithms.checks import check_parts
from fsl_sage.algorithms.names import find_algorithm, is_own, names_where
from fsl_sage.config import Config, GivenOptions, convert, given_options, option
from fsl_sage.errors import InputError, described, listed, nearest, sentence
from fsl_sage.reading import short

CUTS_BY_CLIENT = ("cuts", "client_memories")
"""Options that give each client a cut of its own. Where they are refused, an algorithm says why."""


def option_fields(kind: type[Algorithm]) -> Mapping[str, Field]:
    """An algorithm's own options by name."""
    return MappingProxyType({each.name: each for each in fields(kind.Options)})


def owners(path: str, *, compared: bool = False) -> list[str]:
    """The algorithms of the package that have an option; with `compared`, those that have it in a comparison too."""
    return names_where(lambda kind: path in option_fields(kind) and not (compared and path in kind.not_compared))


def resolve(config: Config) -> Config:
    """The configuration with the options of its algorithm as the algorithm's own dataclass.

    Whatever was given (nothing, some values, all of them), the same options make equal configurations. An option of
    another algorithm is refused; if the options are a preset's for several algorithms, it is left out.
    """
    kind = find_algorithm(config.algorithm)
    if type(config.options) is kind.Options:
        return config
    given, source = given_options(config.options), ""
    if isinstance(config.options, GivenOptions):
        source = f"{config.options.source}: " if config.options.source else ""
        if config.options.of_several:
            given = {name: value for name, value in given.items() if name in option_fields(kind) or not owners(name)}
    try:
        refuse_foreign(given, {config.algorithm: kind})
        return replace(config, options=_make(config.algorithm, kind, given))
    except InputError as error:
        raise InputError(f"{source}{error}") from None


def as_algorithm(
    config: Config, name: str, changes: Mapping[str, Any] | None = None, without: Iterable[str] = ()
) -> Config:
    """The configuration for another algorithm, with its options as far as they are given.

    Args:
        config: Its options may be those of several algorithms; what `name` does not have is left out.
        name: The algorithm.
        changes: Options of that algorithm, in the place of those that are given.
        without: Options that have their defaults, whatever is given.
    """
    own = option_fields(find_algorithm(name)).keys() - set(without)
    given = {path: value for path, value in given_options(config.options).items() if path in own}
    return resolve(replace(config, algorithm=name, options=GivenOptions({**given, **(changes or {})})))


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm that the configuration names, with its options."""
    config = resolve(config)
    kind = find_algorithm(config.algorithm)
    if config.model.recalibrate and not kind.stores_uploads:
        others = listed(names_where(lambda each: each.stores_uploads), "or")
        raise InputError(f"--model.recalibrate needs stored uploads, and {config.algorithm} keeps none: give {others}.")
    if len(config.model.cuts) == 2 and not kind.takes_two_cuts:
        others = listed(names_where(lambda each: each.takes_two_cuts))
        raise InputError(
            f"{config.algorithm} takes one cut, not {config.model.cut}: its S-server computes the loss. "
            f"U-shapes run with {others}."
        )
    algorithm = _made(kind, config)
    check_parts(config.algorithm, algorithm)
    return algorithm


def _made(kind: type[Algorithm], config: Config) -> Algorithm:
    try:
        return kind(config)
    except InputError:
        raise
    except Exception as error:  # whatever the user's own class does
        if not is_own(config.algorithm):
            raise
        raise InputError(sentence(f"--algorithm {config.algorithm} cannot be made: {described(error)}")) from error


def refuse_foreign(given: Iterable[str], chosen: Mapping[str, type[Algorithm]], *, compared: bool = False) -> None:
    """Refuse options that none of the chosen algorithms has.

    Args:
        given: The names of the options.
        chosen: The algorithms by name.
        compared: Whether they are compared: an algorithm then has no option for which another one stands.
    """
    own = {
        name for kind in chosen.values() for name in option_fields(kind) if not (compared and name in kind.not_compared)
    }
    for name in given:
        if name in own:
            continue
        if not (having := owners(name, compared=compared)):
            there = sorted({each.name for each in fields(Config)} - {"options"} | own)
            raise InputError(f"'{short(name)}' is not an option{nearest(name, there, '; there are')}")
        where = "In a comparison " if compared and any(name in option_fields(kind) for kind in chosen.values()) else ""
        why = "".join(f": {kind.one_cut_because}" for kind in chosen.values()) if name in CUTS_BY_CLIENT else ""
        raise InputError(f"{where}{option(name)} is an option of {listed(having)}, not of {listed(chosen)}{why}.")


def _make(name: str, kind: type[Algorithm], given: Mapping[str, Any]) -> Any:
    """The dataclass of an algorithm's options, each checked against its type."""
    hints = get_type_hints(kind.Options)
    missing = [each.name for each in fields(kind.Options) if _is_required(each) and each.name not in given]
    if missing:
        raise InputError(f"{name} needs {listed(map(option, missing))}.")
    values = {key: convert(value, hints[key], key) for key, value in given.items()}
    try:
        return kind.Options(**values)
    except InputError:
        raise
    except ValueError as error:  # as any check of a range in Python
        raise InputError(sentence(f"The options of {name} are not possible: {described(error)}")) from error


def _is_required(each: Field) -> bool:
    return each.default is MISSING and each.default_factory is MISSING

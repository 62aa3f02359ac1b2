"""A configuration seen as flat options: which of them a comparison varies, and which algorithms they concern."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from fsl_sage.algorithms import option_fields, resolve
from fsl_sage.algorithms.names import known_algorithm
from fsl_sage.algorithms.options import owners
from fsl_sage.config import (
    NO_PART_OF_THE_RESULT,
    RESPELLED,
    Config,
    brings_modules,
    convert,
    defaults_of,
    flatten,
    from_dict,
    known_values,
    respelled,
    to_dict,
)
from fsl_sage.errors import InputError
from fsl_sage.own_modules import is_own

HETEROGENEITY = "heterogeneity"
"""The name under which the partition and its parameter are compared, together."""
IID = "iid"

# What distinguishes the runs of a series, or says where and how a run was computed: never a setting.
NO_SETTING = {"algorithm", "seed", "device", "threads", "clients_at_once", "data.dir", *NO_PART_OF_THE_RESULT}
_SHARED = {HETEROGENEITY, *(each.name for each in fields(Config))}
"""What all algorithms have; another name is an option of one that is not in the package."""
_LARGEST = 2**62
_OF_OWN_MODULES = ("data.name", "data.augmentation", "model.name", "algorithm")
_PARTITION = {"data.partition", "data.alpha", "data.shards_per_client"}


def nest(path: str, value: Any) -> dict[str, Any]:
    """The nested values with one option in them."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def option_path(name: str) -> str:
    """An option as a person writes it (--align-every, align_every, model.auxiliary) as a field's path."""
    path = name.strip().removeprefix("--").replace("-", "_")
    return RESPELLED.get(path, path)


def options_of(config: Config) -> dict[str, Any]:
    """All options by path, as plain values."""
    return flatten(to_dict(config))


def recorded_options(config: Config) -> dict[str, Any]:
    """The options, by path, that can change what a run of this algorithm writes down.

    Where the files of a data set lie changes nothing, unless the user's own code reads them.
    """
    config = resolve(config)
    silent = set(NO_PART_OF_THE_RESULT) | (set() if brings_modules(config) else {"data.dir"})
    return {
        path: value
        for path, value in options_of(config).items()
        if path not in silent and (concerns(config.algorithm, path) or has_option(config.algorithm, path))
    }


def written_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a configuration that was written down, by path, with today's defaults for those it lacks.

    Options of other algorithms are left out: older versions wrote them down too. A value that cannot be one of its
    option is an InputError.
    """
    from_dict(known_values(_given(respelled(values))), Config())
    flat = {
        path: value for path, value in flatten(respelled(values)).items() if value is not None or _may_be_null(path)
    }
    if any(isinstance(value, int) and abs(value) > _LARGEST for value in flat.values()):
        raise InputError("config.json has a number that is no option's.")
    kind = known_algorithm(str(flat["algorithm"]))
    if kind is None:
        return {**options_of(Config()), **flat}
    own = option_fields(kind)
    hints = get_type_hints(kind.Options)
    kind.Options(**{path: convert(flat[path], hints[path], path) for path in own if flat.get(path) is not None})
    usual = {name: value for name, value in defaults_of(kind.Options).items() if name not in flat}
    kept = {path: value for path, value in flat.items() if path in own or not owners(path)}
    return {**options_of(Config()), **usual, **kept}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that are null: an option that may not be null today may have been so earlier."""
    return {
        name: _given(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def _may_be_null(path: str) -> bool:
    try:
        from_dict(known_values(nest(path, None)), Config())
    except InputError:
        return False
    return True


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that may be a setting of a comparison; the partition is one of them, as `heterogeneity`."""
    hidden = NO_SETTING | _PARTITION
    if any(is_own(str(options.get(path, ""))) for path in _OF_OWN_MODULES):
        hidden = hidden - {"data.dir"}  # their code reads it
    kept = {path: value for path, value in options.items() if path not in hidden}
    return {HETEROGENEITY: heterogeneity(options), **kept}


def heterogeneity(options: Mapping[str, Any]) -> str:
    """The partition as it stands in the names of runs: iid, alpha0.1 or shards2."""
    partition = options["data.partition"]
    if partition == "dirichlet":
        return f"alpha{options['data.alpha']:g}"
    return f"shards{options['data.shards_per_client']}" if partition == "shards" else str(partition)


def dirichlet_alpha(name: str) -> float | None:
    """The alpha behind a heterogeneity: iid is the limit of large alpha; None for shards."""
    if name == IID:
        return float("inf")
    return float(name.removeprefix("alpha")) if name.startswith("alpha") else None


def concerns(algorithm: str, path: str) -> bool:
    """Whether an option can change a run of this algorithm in a comparison."""
    kind = known_algorithm(algorithm)
    if kind is None:
        return True
    if path in option_fields(kind):
        return path not in kind.not_compared
    return path.partition(".")[0] in _SHARED and not owners(path) and kind.reads(path)


def has_option(algorithm: str, path: str) -> bool:
    """Whether an option is one of the algorithm's own."""
    kind = known_algorithm(algorithm)
    return kind is not None and path in option_fields(kind)

"""The grid of a comparison: all combinations of algorithms, partitions, varied options and seeds, each with a name."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from fsl_sage.algorithms import Algorithm, find_algorithm, make_algorithm
from fsl_sage.algorithms.options import as_algorithm, owners, refuse_foreign
from fsl_sage.config import (
    NO_PART_OF_THE_RESULT,
    Config,
    GivenOptions,
    flatten,
    from_dict,
    given_options,
    option,
    read_preset,
)
from fsl_sage.errors import InputError
from fsl_sage.records.files import as_file_name
from fsl_sage.report.options import (
    IID,
    NO_SETTING,
    concerns,
    has_option,
    heterogeneity,
    nest,
    option_path,
    options_of,
)

_OWN_OPTION = {"algorithm": "--algorithms", "seed": "--seeds", "data.alpha": "--alpha", "data.partition": "--alpha"}


@dataclass(frozen=True)
class Grid:
    """What is combined. Where a field is empty, the configuration's own value holds."""

    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    alpha: tuple[str, ...] = ()
    """Dirichlet parameters, or iid."""
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values by the path of an option."""
    target: tuple[float, ...] = ()
    """Accuracies to which the report counts bytes and rounds."""


class Plan(NamedTuple):
    """One run of the grid; its name is that of its directory."""

    name: str
    config: Config


def make_grid(
    algorithms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    alpha: Sequence[float | str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    target: Sequence[float] = (),
) -> Grid:
    """A grid from plain lists; options may be spelled as on the command line, alphas as numbers."""
    return Grid(
        several(algorithms),
        several(seeds),
        tuple(value if isinstance(value, str) else f"{value:g}" for value in several(alpha)),
        {option_path(name): several(values) for name, values in (vary or {}).items()},
        tuple(float(value) for value in target),
    )


def several(given: Any) -> tuple[Any, ...]:
    """Values that are given as a list, or one that stands alone: a text is one, and not a row of letters."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)
    return tuple(tuple(value) if isinstance(value, list) else value for value in given)


def load_grid(name_or_path: str | Path) -> Grid:
    """The table [compare] of a preset; empty where there is none."""
    table = read_preset(name_or_path).get("compare", {})
    names = [each.name for each in fields(Grid)]
    if not isinstance(table, dict) or not set(table) <= set(names):
        raise InputError(f"{name_or_path}: [compare] is a table with {', '.join(names)}; nothing else is accepted.")
    for name, kind in (("algorithms", str), ("seeds", int), ("alpha", int | float | str), ("target", int | float)):
        values = table.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise InputError(f"{name_or_path}: '{name}' in [compare] must be a list, as {_EXAMPLES[name]}.")
    vary = table.get("vary", {})
    varied: dict[str, Any] = flatten(vary) if isinstance(vary, dict) else {}
    if not isinstance(vary, dict) or not all(isinstance(values, list) for values in varied.values()):
        raise InputError(f"{name_or_path}: 'vary' in [compare] must be a table of lists, as {_EXAMPLES['vary']}.")
    lists = {name: table.get(name, []) for name in ("algorithms", "seeds", "alpha", "target")}
    return make_grid(**lists, vary=varied)


_EXAMPLES = {
    "algorithms": 'algorithms = ["fsl-sage", "cse-fsl"]',
    "seeds": "seeds = [1, 2, 3]",
    "alpha": 'alpha = ["iid", 0.1, 1]',
    "target": "target = [0.5]",
    "vary": "vary = { align_every = [2, 5, 10] }",
}


def refuse_overruled(config: Config, preset: Config, grid: Grid) -> None:
    """Refuse an option for all runs where the grid gives each run its own."""
    by_grid = {"algorithm": grid.algorithms, "seed": grid.seeds, "data.partition": grid.alpha, "data.alpha": grid.alpha}
    for path in grid.vary:
        _refuse_unvaried(path, grid)
    given, usual = options_of(config), options_of(preset)
    for path, values in {**by_grid, **grid.vary}.items():
        if values and path in given and given[path] != usual.get(path):
            instead = f"--vary {path}=…" if path in grid.vary else _OWN_OPTION[path]
            raise InputError(
                f"{option(path)} {given[path]} has no effect on a grid with {', '.join(map(str, values))}: "
                f"give {instead} instead."
            )


def parse_vary(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """`OPTION=a,b,c` as it is given on the command line; a value that is a list itself stands in brackets."""
    varied: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise InputError(f"--vary {text} is not possible: give OPTION=a,b,c, as in --vary align_every=2,5,10.")
        path = option_path(name)
        if values.count("[") != values.count("]"):
            raise InputError(
                f"--vary {text} is not possible: a bracket has no partner. Give every list in brackets of its own, as "
                f"in --vary '{path}=[0,1],[2]'."
            )
        words = re.findall(r"\[[^]]*\]|[^,]+", values)
        varied[path] = (*varied.get(path, ()), *(_value(word.strip()) for word in words if word.strip()))
    return varied


def _value(word: str) -> Any:
    """A number, true, false, none, a list of these, or the text itself; the configuration checks it by its option."""
    if word.startswith("[") and word.endswith("]"):
        return tuple(_value(each.strip()) for each in word[1:-1].split(",") if each.strip())
    plain = {"true": True, "false": False, "none": None}
    if word.lower() in plain:
        return plain[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def chosen_algorithms(algorithm: str, grid: Grid) -> tuple[str, ...]:
    """The algorithms of the grid; the configuration's own if it names none."""
    return _unique(grid.algorithms) or (algorithm,)


def plan_runs(config: Config, grid: Grid) -> list[Plan]:
    """Every run of the grid; all runs with the first seed come first. An impossible grid is refused."""
    algorithms = chosen_algorithms(config.algorithm, grid)
    _check(config, grid, algorithms)
    plans: dict[str, Plan] = {}
    seeds = _unique(grid.seeds) or (config.seed,)
    for seed, base, values, algorithm in itertools.product(seeds, _partitions(config, grid), _varied(grid), algorithms):
        own = {path: value for path, value in values.items() if concerns(algorithm, path)}
        plan = _plan(base, algorithm, seed, own)
        if plan.name in plans and plans[plan.name].config != plan.config:
            raise InputError(f"Two runs of the grid would be called {plan.name}: give --vary values that differ more.")
        plans[plan.name] = plan
    return list(plans.values())


def _check(config: Config, grid: Grid, algorithms: Sequence[str]) -> None:
    kinds = {name: find_algorithm(name) for name in algorithms}
    _check_options(config, kinds)
    shared = {each.name for each in fields(Config)}
    for path, values in grid.vary.items():
        if not values:
            raise InputError(f"--vary {path} has no values: give some, as in --vary align_every=2,5,10.")
        _refuse_unvaried(path, grid)
        if path.split(".")[0] not in shared:
            refuse_foreign([path], kinds, compared=True)
        elif not any(concerns(algorithm, path) for algorithm in algorithms):
            raise InputError(f"--vary {path} changes nothing: it does not concern {', '.join(algorithms)}.")


def _refuse_unvaried(path: str, grid: Grid) -> None:
    """Refuse an option that --vary cannot give."""
    if path == "data.partition":
        if grid.alpha:
            raise InputError(
                "--vary data.partition is not possible beside --alpha, which gives each run its partition: give one."
            )
        return
    if path in _OWN_OPTION:
        raise InputError(f"--vary {path} is not possible: give {_OWN_OPTION[path]} with several values.")
    if path.split(".")[0] in NO_PART_OF_THE_RESULT:
        raise InputError(f"--vary {path} is not possible: {option(path)} never changes a run's numbers.")
    if path in NO_SETTING:
        raise InputError(f"--vary {path} is not possible: {option(path)} says how to compute, not what.")


def _check_options(config: Config, kinds: Mapping[str, type[Algorithm]]) -> None:
    """Refuse options that no algorithm of the grid takes; those of a preset may be meant for others."""
    given = given_options(config.options)
    if isinstance(config.options, GivenOptions) and config.options.of_several:
        given = {name: value for name, value in given.items() if not owners(name)}
    refuse_foreign(given, kinds, compared=True)


def _partitions(config: Config, grid: Grid) -> list[Config]:
    """The configuration with each partition that --alpha names."""
    if not grid.alpha:
        return [config]
    configs = []
    for word in _unique(grid.alpha):
        if word == IID:
            changes: dict[str, Any] = {"partition": IID}
        else:
            try:
                changes = {"partition": "dirichlet", "alpha": float(word)}
            except ValueError:
                raise InputError(f"--alpha {word} is not possible: give numbers from 0.01 to 10000, or iid.") from None
        configs.append(from_dict({"data": changes}, config))
    return configs


def _varied(grid: Grid) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(_unique(choices) for choices in grid.vary.values())):
        yield dict(zip(grid.vary, values, strict=True))


def _plan(base: Config, algorithm: str, seed: int, values: Mapping[str, Any]) -> Plan:
    own = {name: value for name, value in values.items() if has_option(algorithm, name)}
    shared = {path: value for path, value in values.items() if path not in own}
    base = as_algorithm(base, algorithm, own, without=find_algorithm(algorithm).not_compared)
    config: Config = from_dict(_merge([nest(path, value) for path, value in {"seed": seed, **shared}.items()]), base)
    make_algorithm(config).check()
    named = {path: value for path, value in values.items() if path != "data.partition"}  # which is in every name
    suffixes = [f"{option(path).removeprefix('--')}{_spell(value)}" for path, value in named.items()]
    return Plan(
        "_".join([as_file_name(algorithm), heterogeneity(options_of(config)), f"seed{seed}", *suffixes]), config
    )


def _merge(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = _merge([merged[name], value]) if both else value
    return merged


def _spell(value: Any) -> str:
    """A value as a part of a directory's name."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return "-" + re.sub(r"[^A-Za-z0-9.+]+", "-", str(value)).strip("-").lower()


def _unique(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))

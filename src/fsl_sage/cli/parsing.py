"""Parses a command line: options override a preset, and a preset overrides the defaults."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import tyro

from fsl_sage.cli.arguments import CompareArguments, CostArguments, CutsArguments, InitArguments, RunArguments
from fsl_sage.compare.grid import Grid, for_algorithms, load_grid, parse_vary, refuse_overruled
from fsl_sage.config import Config, default_config, load_preset
from fsl_sage.errors import InputError
from fsl_sage.report.write import ReportOptions

ROUNDS = "--align-rounds"

Arguments = TypeVar("Arguments", RunArguments, CostArguments, CutsArguments, InitArguments)
Parsed = TypeVar("Parsed", RunArguments, CostArguments, CutsArguments, InitArguments, CompareArguments)


def parse(kind: type[Arguments], command: str, args: Sequence[str]) -> Arguments:
    """The arguments of a command: options override a preset, and a preset overrides the defaults."""
    args = _without_commas(args)
    return _over_defaults(
        _preset_of(args),
        lambda base: tyro.cli(kind, prog=f"fsl-sage {command}", default=kind(config=base), args=args),
    )


def parse_comparison(args: Sequence[str]) -> tuple[CompareArguments, Grid]:
    """The arguments of `compare` and its grid, which a preset's table [compare] may give."""
    args = _without_commas(args)
    source = _preset_of(args)
    grid = Grid() if source is None else load_grid(source)
    default = CompareArguments(
        algorithms=grid.algorithms, seeds=grid.seeds, alpha=grid.alpha, report=ReportOptions(grid.target)
    )
    arguments = _over_defaults(
        source,
        lambda base: tyro.cli(
            CompareArguments, prog="fsl-sage compare", default=replace(default, config=base), args=args
        ),
    )
    vary = {**grid.vary, **parse_vary(arguments.vary)}
    grid = Grid(arguments.algorithms, arguments.seeds, arguments.alpha, vary)
    base = _base(source, default_config(arguments.config.data.name))
    refuse_overruled(arguments.config, base, grid)
    return replace(arguments, config=for_algorithms(arguments.config, base, arguments.algorithms)), grid


def _over_defaults(source: str | None, read: Callable[[Config], Parsed]) -> Parsed:
    """Parse with the defaults of the data set. As the options may name it, they may have to be read twice."""
    base = _base(source)
    arguments = read(base)
    own = default_config(arguments.config.data.name)
    return arguments if own == default_config(base.data.name) else read(_base(source, own))


def _base(source: str | None, defaults: Config | None = None) -> Config:
    return (defaults or Config()) if source is None else load_preset(source, defaults)


def _without_commas(args: Sequence[str]) -> list[str]:
    """The same with numbers that are joined by commas apart: `--align-rounds 0,1,2` is `--align-rounds 0 1 2`."""
    words: list[str] = []
    for word in args:
        name, equals, value = word.partition("=")
        if name == ROUNDS and equals:
            words += [name, *value.split(",")]
        elif _last_option(words) == ROUNDS and not word.startswith("-"):
            words += word.split(",")
        else:
            words.append(word)
    return words


def _last_option(words: Sequence[str]) -> str | None:
    return next((word for word in reversed(words) if word.startswith("-")), None)


def _preset_of(args: Sequence[str]) -> str | None:
    """The preset that the arguments name. It is needed before the options are parsed, because it gives defaults."""
    named = [args[place + 1] for place, word in enumerate(args[:-1]) if word == "--preset"]
    named += [word.removeprefix("--preset=") for word in args if word.startswith("--preset=")]
    named += [args[0]] if args and not args[0].startswith("-") else []
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} are several presets: give one.")
    if named and not args[0].startswith("-") and not named[0].endswith(".toml"):
        raise InputError(f"'{named[0]}' is not a TOML file; for a preset of the package give --preset {named[0]}.")
    return named[0] if named else None

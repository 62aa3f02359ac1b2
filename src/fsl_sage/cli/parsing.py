"""Parses a command line: options override a preset, and a preset overrides the defaults."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fsl_sage.algorithms import ALGORITHMS, is_own, resolve
from fsl_sage.cli.arguments import (
    CompareArguments,
    CostArguments,
    CutsArguments,
    ExportArguments,
    InitArguments,
    RunArguments,
)
from fsl_sage.cli.own_options import OwnOptions
from fsl_sage.cli.words import without_commas
from fsl_sage.compare.grid import Grid, load_grid, parse_vary, refuse_overruled
from fsl_sage.config import (
    ALPHA,
    RESPELLED,
    WHOLE,
    Config,
    check_range,
    check_ranges,
    default_config,
    load_preset,
    option,
)
from fsl_sage.errors import InputError
from fsl_sage.report.write import ReportOptions

Arguments = TypeVar("Arguments", RunArguments, CostArguments, CutsArguments, InitArguments, ExportArguments)
Parsed = TypeVar("Parsed", RunArguments, CostArguments, CutsArguments, InitArguments, ExportArguments, CompareArguments)

_GRID = ("algorithms", "seeds", "alpha")
"""The options of a comparison that take several values, and name its runs."""


def parse(kind: type[Arguments], command: str, args: Sequence[str]) -> Arguments:
    """The arguments of a command: options override a preset, and a preset overrides the defaults."""
    args = _file_first(args)
    source = _preset_of(args)
    named: str = _named_by(args, source)
    several = kind in (CostArguments, CutsArguments)  # which show every algorithm
    own = OwnOptions([*ALGORITHMS, *([named] if is_own(named) else [])] if several else [named])
    arguments = _read(kind, command, args, source, own)
    if (first := _found_first(arguments.file, args)) is not None:
        return parse(kind, command, first)
    config = arguments.config if several else resolve(arguments.config)
    return replace(arguments, config=config)


def parse_comparison(args: Sequence[str]) -> tuple[CompareArguments, Grid]:
    """The arguments of `compare` and its grid, which a preset's table [compare] may give."""
    args = without_commas(_file_first(args), _GRID)
    source = _preset_of(args)
    grid = Grid() if source is None else load_grid(source)
    for name in map(option, _GRID):
        if name in args and not _words_after(name, args):
            raise InputError(f"{name} stands there without a value: give one or more, or leave it out.")
    chosen = _words_after("--algorithms", args) or grid.algorithms or (_named_by(args, source),)
    own = OwnOptions(chosen, compared=True)
    default = CompareArguments(
        algorithms=grid.algorithms, seeds=grid.seeds, alpha=grid.alpha, report=ReportOptions(grid.target)
    )
    arguments = _read(CompareArguments, "compare", args, source, own, default)
    if (first := _found_first(arguments.file, args)) is not None:
        return parse_comparison(first)
    _check_comparison(arguments, own)
    vary = {**grid.vary, **parse_vary(arguments.vary)}
    grid = Grid(arguments.algorithms, arguments.seeds, arguments.alpha, vary)
    base = own.in_config(_base(source, default_config(arguments.config.data.name)))
    refuse_overruled(arguments.config, base, grid)
    return arguments, grid


def _check_comparison(arguments: CompareArguments, own: OwnOptions) -> None:
    """Refuse what the grid's own options cannot be, by the names that they have here."""
    check_ranges(arguments, {"jobs": WHOLE})
    words, least, most = ALPHA
    for word in arguments.alpha:
        if (value := _number(word)) is not None:
            check_range("--alpha", value, (f"{words}, or iid", least, most))
    for path, values in parse_vary(arguments.vary).items():
        given = ",".join(map(str, values))
        if path in own.lists() and not all(isinstance(value, tuple) for value in values):
            raise InputError(
                f"--vary {path}={given} is not possible, because each value of this option is a list: give every list "
                f"in brackets, as in --vary '{path}=[{given}]'."
            )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # iid; another word is refused where the partitions are made
        return None


def _read(
    kind: type[Parsed],
    command: str,
    args: Sequence[str],
    source: str | None,
    own: OwnOptions,
    default: Parsed | None = None,
) -> Parsed:
    """Parse with the defaults of the data set. As the options may name it, they may have to be read twice."""
    own.refuse_others(args)
    words = [*map(_respelled, args)]

    def read(base: Config) -> Parsed:
        return own.parse(kind, command, words, base, default or kind())

    base = _base(source)
    arguments = read(base)
    usual = default_config(arguments.config.data.name)
    return arguments if usual == default_config(base.data.name) else read(_base(source, usual))


def _respelled(word: str) -> str:
    """A word of the command line; an option that has moved by its newer spelling."""
    name, equals, value = word.partition("=")
    newer = {option(old): option(new) for old, new in RESPELLED.items()}
    return f"{newer.get(name, name)}{equals}{value}"


def _base(source: str | None, defaults: Config | None = None) -> Config:
    return (defaults or Config()) if source is None else load_preset(source, defaults)


def _named_by(args: Sequence[str], source: str | None) -> str:
    """The algorithm that the options name, or the preset, or else the usual one."""
    words = _words_after("--algorithm", args)
    return words[0] if words else _base(source).algorithm


def _words_after(name: str, args: Sequence[str]) -> tuple[str, ...]:
    """The values of an option, which decide which other options there are."""
    found: tuple[str, ...] = ()
    for place, word in enumerate(args):
        if word == name:
            found = tuple(itertools.takewhile(lambda each: not each.startswith("-"), args[place + 1 :]))
        elif word.startswith(f"{name}="):
            more = itertools.takewhile(lambda each: not each.startswith("-"), args[place + 1 :])
            found = (word.partition("=")[2], *more)
    return found


def _preset_of(args: Sequence[str]) -> str | None:
    """The preset that the arguments name. It is needed before the options are parsed, because it gives defaults."""
    files = [*itertools.takewhile(lambda word: not word.startswith("-"), args)]
    named = [args[place + 1] for place, word in enumerate(args[:-1]) if word == "--preset"]
    named += [word.removeprefix("--preset=") for word in args if word.startswith("--preset=")]
    named += files
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} are several presets: give one.")
    if files and not files[0].endswith(".toml"):
        raise InputError(f"'{files[0]}' is not a TOML file; for a preset of the package give --preset {files[0]}.")
    return named[0] if named else None


def _file_first(args: Sequence[str]) -> list[str]:
    """The words with a TOML file in front that stands behind values: it is not one more value of a list."""
    for place, (before, word) in enumerate(itertools.pairwise(args), 1):
        names_option = before.startswith("-") and "=" not in before  # of which the file may be the value
        if word.endswith(".toml") and not names_option:
            return [word, *args[:place], *args[place + 1 :]]
    return [*args]


def _found_first(file: Path | None, args: Sequence[str]) -> list[str] | None:
    """The words with the preset's file in front, if tyro has found it behind options: it decides how they are read."""
    if file is None or (args and Path(args[0]) == file):
        return None
    place = max(place for place, word in enumerate(args) if Path(word) == file)
    return [args[place], *args[:place], *args[place + 1 :]]

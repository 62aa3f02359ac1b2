"""The words of a command line, from which tyro makes a command's arguments.

Looked at before tyro sees them: flags, which take no value, and lists, whose values commas may join.
"""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from fsl_sage.cli.arguments import Flat
from fsl_sage.cli.numbers import NUMBERS
from fsl_sage.config import option
from fsl_sage.errors import InputError

Arguments = TypeVar("Arguments")
_TRUTHS = ("true", "false", "yes", "no", "on", "off")


def read(kind: type[Arguments], command: str, args: Sequence[str], default: Arguments | None = None) -> Arguments:
    """The arguments of a command.

    Args:
        kind: A dataclass; its fields are the options.
        command: The command, for --help.
        args: The words.
        default: The values of what is not given, if they differ from those of `kind`.
    """
    hints = dict(_options(kind))
    _refuse_values_of_flags(args, hints)
    words = without_commas(args, [path for path, hint in hints.items() if _is_list(hint)])
    usual: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=f"fsl-sage {command}", args=words, registry=NUMBERS, **usual)


def _options(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, type) of every option, those in groups too."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        bare, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(bare):
            yield from _options(bare, prefix if Flat in notes else f"{prefix}{name}.")
        elif tyro.conf.Positional not in notes:
            yield prefix + name, bare if tyro.conf.UseAppendAction not in notes else str


def _is_list(hint: Any) -> bool:
    return tuple in (get_origin(hint), *map(get_origin, get_args(hint)))


def _refuse_values_of_flags(args: Sequence[str], hints: dict[str, Any]) -> None:
    """Refuse `--flag=true` and `--flag true`: of the second, tyro would take the value for a file."""
    flags = {spelling: path for path, hint in hints.items() if hint is bool for spelling in _spellings(path)}
    for word, following in pairwise([*args, ""]):
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") in flags and (equals or following.lower() in _TRUTHS):
            on, off = _spellings(flags[name.replace("_", "-")])
            raise InputError(f"{name} takes no value: give {on} or {off}.")


def _spellings(path: str) -> tuple[str, str]:
    """A flag and its opposite, as tyro spells them: `--data.augment` and `--data.no-augment`."""
    group, dot, name = path.rpartition(".")
    return option(path), option(f"{group}{dot}no_{name}")


def without_commas(args: Sequence[str], lists: Sequence[str]) -> list[str]:
    """The words, with values that commas join taken apart: `--seeds 0,1,2` is `--seeds 0 1 2`.

    Args:
        args: The words.
        lists: The paths of options that take several values.
    """
    several = {*map(option, lists)}
    words: list[str] = []
    for word in args:
        name, equals, value = word.partition("=")
        if name in several and equals:
            words += [name, *value.split(",")]
        elif _last_option(words) in several and not word.startswith("-"):
            words += word.split(",")
        else:
            words.append(word)
    return words


def _last_option(words: Sequence[str]) -> str | None:
    return next((word for word in reversed(words) if word.startswith("-")), None)

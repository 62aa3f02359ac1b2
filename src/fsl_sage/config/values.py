"""Values for the fields of a configuration: what fits a field's type, and what can be made to."""

import dataclasses
import functools
import numbers
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fsl_sage.config.ranges import option
from fsl_sage.errors import InputError, nearest
from fsl_sage.reading import short

Kind = TypeVar("Kind")


def named_fields(kind: type[Kind]) -> type[Kind]:
    """A decorator for dataclasses of options: a field's misspelt name is refused with the one that was meant."""
    make = kind.__init__

    @functools.wraps(make)
    def checked(self: Kind, *args: Any, **values: Any) -> None:
        known = [each.name for each in dataclasses.fields(self)]  # type: ignore[arg-type]
        for name in (name for name in values if name not in known):
            raise InputError(
                f"'{short(name)}' is not an option of {kind.__name__}{nearest(name, known, '; there are')}"
            )
        make(self, *args, **values)

    kind.__init__ = checked  # type: ignore[assignment, method-assign]
    return kind


def convert(value: Any, hint: Any, path: str) -> Any:
    """A plain value as a field's type has it; refuses one that does not fit.

    Args:
        value: As TOML or JSON has it.
        hint: The type.
        path: The field, for an error: `data.alpha`.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        if kind is type(None) and value is None:
            return None
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if get_origin(kind) is tuple and isinstance(value, list | tuple):
            return tuple(convert(item, get_args(kind)[0], path) for item in value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**1023:
            return float(value)
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if kind in (str, bool) and isinstance(value, kind):
            return value
        if kind is str and isinstance(value, int) and not isinstance(value, bool):
            return str(value)  # an auxiliary of so many bytes
        if kind is Path and isinstance(value, str | Path):
            return Path(value)
    raise InputError(f"{option(path)} {short(repr(value))} is not possible: give {_describe(kinds)}.")


def _describe(kinds: tuple[Any, ...]) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
    words = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += [str(choice) for choice in get_args(kind)]
        elif kind is not type(None):
            words.append(names.get(kind, "a list"))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def settle(holder: Any, kind: type, group: str = "") -> None:
    """Give the fields of a frozen dataclass values of their types, as far as it is obvious what is meant.

    `"2"` is the number 2, `"runs/mine"` a path, a list a tuple, a mapping a group of options. What is not obvious is
    refused, with the field's name.

    Args:
        holder: The instance, from its `__post_init__`.
        kind: Its class.
        group: The name of the group that it is in a configuration, with a dot behind it.
    """
    for name, hint in _hints(kind).items():
        value = getattr(holder, name)
        if not _fits(value, hint):
            object.__setattr__(holder, name, _settled(value, hint, group + name))


@functools.lru_cache(maxsize=32)
def _hints(kind: type) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(kind)}
    return {name: hint for name, hint in get_type_hints(kind).items() if name in names}


def _fits(value: Any, hint: Any) -> bool:
    """The usual case, quickly; whatever is not sure is looked at again."""
    return (
        hint is Any
        or (isinstance(hint, type) and type(value) is hint)
        or (value is None and type(None) in get_args(hint))
    )


def _settled(value: Any, hint: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            wanted = getattr(hint, "__name__", str(hint))
            raise InputError(f"{path} is a group of options: give a {wanted} or a dictionary, not {_shown(value)}.")
        return _group(value, hint, path)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return convert(_plainer(value, kinds), hint, path)


def _group(values: Mapping[str, Any], kind: Any, path: str) -> Any:
    known = _hints(kind)
    for name in values:
        if name not in known:
            raise InputError(f"'{path}.{short(name)}' is not an option{nearest(name, sorted(known), '; there are')}")
    return kind(**values)


def _plainer(value: Any, kinds: tuple[Any, ...]) -> Any:
    """A number that is written as a text, or is of another library, as Python's own."""
    if isinstance(value, str) and not {str, Path} & set(kinds):
        for kind in (int, float):
            if kind in kinds:
                try:
                    return kind(value)
                except ValueError:
                    continue
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool | int):
        number = float(value)
        return int(number) if int in kinds and number.is_integer() else number
    if isinstance(value, list | tuple) and str in kinds and all(isinstance(item, str) for item in value):
        return ",".join(value)  # the cuts of a U-shape
    return value


def _shown(value: Any) -> str:
    return short(repr(value))

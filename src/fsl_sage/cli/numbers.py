"""Numbers on the command line. A word that is none is refused in plain words instead of Python's."""

import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

NUMBERS = ConstructorRegistry()
"""To be given to `tyro.cli`."""
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number such as 0.5"),
}
"""By type: what counts as one, and what it is called."""


@NUMBERS.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How a number, a number or None, and a row of numbers are read; None for all other types."""
    kind, parts = info.type, get_args(info.type)
    if kind in _KINDS:
        return _spec(kind, lambda words: _read(kind, words[0]), _is_one(kind))
    if get_origin(kind) in (Union, types.UnionType) and len(parts) == 2 and types.NoneType in parts:
        (own,) = {*parts} - {types.NoneType}
        return _or_none(own) if own in _KINDS else None
    if get_origin(kind) is tuple and len(parts) == 2 and parts[0] in _KINDS and parts[1] is Ellipsis:
        return _row(parts[0])
    return None


def _read(kind: Any, word: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"'{word}' is not {_KINDS[kind][1]}") from None


def _is_one(kind: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, _KINDS[kind][0]) and not isinstance(value, bool)


def _or_none(kind: Any) -> PrimitiveConstructorSpec[Any]:
    def read(words: list[str]) -> Any:
        return None if words[0] == "None" else _read(kind, words[0])

    fits = _is_one(kind)
    return _spec(kind, read, lambda value: value is None or fits(value), metavar=f"{{None}}|{kind.__name__.upper()}")


def _row(kind: Any) -> PrimitiveConstructorSpec[Any]:
    name, fits = kind.__name__.upper(), _is_one(kind)
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{name} [{name} ...]]",
        instance_from_str=lambda words: tuple(_read(kind, word) for word in words),
        is_instance=lambda value: isinstance(value, tuple) and all(map(fits, value)),
        str_from_instance=lambda value: [*map(str, value)],
    )


def _spec(
    kind: Any, read: Callable[[list[str]], Any], fits: Callable[[Any], bool], metavar: str | None = None
) -> PrimitiveConstructorSpec[Any]:
    nargs: Literal[1] = 1
    return PrimitiveConstructorSpec(
        nargs=nargs,
        metavar=metavar or kind.__name__.upper(),
        instance_from_str=read,
        is_instance=fits,
        str_from_instance=lambda value: [str(value)],
    )

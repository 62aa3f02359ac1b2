"""What is refused of an algorithm before it runs: figures, parts and options that nobody has."""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

from fsl_sage.algorithms.base import Algorithm
from fsl_sage.config import Config, option
from fsl_sage.errors import InputError, listed, nearest
from fsl_sage.reading import short
from fsl_sage.wire.message import AUXILIARY, DECODER

PARTS = ("client", "server", AUXILIARY, DECODER, "head")
"""The parts of a model. Only a U-shape has a head, and only who holds one has a decoder."""


def check_class(name: str, kind: type[Algorithm]) -> None:
    """Refuse a class that lacks something, or says of itself what cannot be."""
    if missing := sorted(kind.__abstractmethods__):
        raise InputError(f"--algorithm {name} lacks {listed(missing)}: define it in {kind.__name__}.")
    _check_options(name, kind.Options)
    _check_uses(name, kind.uses)
    _check_look(name, kind)


def check_parts(name: str, algorithm: Algorithm) -> None:
    """Refuse parts that no model has, and clients without a part that they train."""
    for said in ("averaged", "holds", "own_parts"):
        for part in _names(f"{said} of {name}", getattr(algorithm, said), "client"):
            if part not in PARTS:
                raise InputError(f"{said} of {name} has '{short(part)}'{nearest(part, PARTS, '; the parts are')}")
    for said in ("averaged", "own_parts"):
        lacking = [part for part in getattr(algorithm, said) if part not in algorithm.holds]
        if lacking:
            raise InputError(
                f"holds of {name} lacks {listed(lacking)}, which {said} names: clients train it, so they must hold it. "
                f"Put it into holds, or take it out of {said}."
            )


def _names(what: str, given: Sequence[str], example: str) -> Sequence[str]:
    if not isinstance(given, tuple | list) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{what} is {short(repr(given), 40)}: give a tuple of names, such as ('{example}',).")
    return given


def _check_uses(name: str, uses: Sequence[str]) -> None:
    """Refuse options that every algorithm reads, and such as do not exist: it would read fewer than it says."""
    known = Algorithm.uses
    for path in _names(f"uses of {name}", uses, known[0]):
        if not any(f"{path}.".startswith(f"{each}.") or f"{each}.".startswith(f"{path}.") for each in known):
            raise InputError(
                f"uses of {name} has '{short(path)}'{nearest(path, known, '; it names options and groups of these')}"
            )


def _check_look(name: str, kind: type[Algorithm]) -> None:
    """Refuse a title and a colour that no figure can have: figures come when all is trained."""
    title, colour = kind.title, kind.colour
    if not isinstance(title, str):
        raise InputError(f"The title of {name} is {short(title, 40)}: give a text.")
    if colour is not None and not _is_colour(colour):
        raise InputError(
            f"The colour of {name} is {short(colour, 40)}: give one such as #0072B2, or a name that CSS has, such as "
            "teal."
        )


def _is_colour(colour: object) -> bool:
    if not isinstance(colour, str):
        return False
    if re.fullmatch("#[0-9A-Fa-f]{6}", colour):
        return True
    from matplotlib.colors import CSS4_COLORS  # takes a moment, which no algorithm of the package costs

    return colour in CSS4_COLORS


def _check_options(name: str, kind: type) -> None:
    if not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise InputError(f"The Options of {name} must be a dataclass with frozen=True.")
    taken = {each.name for each in fields(Config)} & {each.name for each in fields(kind)}
    if taken:
        raise InputError(
            f"{', '.join(sorted(map(option, taken)))} is an option of every run, so it cannot be one of {name} too: "
            "give it another name."
        )

"""Numbers with units, for people: sizes in bytes, operations, GiB. One place, so that every table spells them alike."""

import math

from fsl_sage.errors import InputError

_THOUSANDS = ("", "k", "M", "G", "T", "P")
MIB = 2**20
_GIB = 2**30


def bytes_text(count: float) -> str:
    """Bytes in units of 1000, as the paper gives the sizes of models: 3.5 MB."""
    return _scaled(count, "B")


def operations_text(count: float) -> str:
    """FLOPs or parameters in units of 1000: 3.5 G."""
    return _scaled(count, "").strip()


def _scaled(count: float, unit: str) -> str:
    for prefix in _THOUSANDS[:-1]:
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:.3g} {_THOUSANDS[-1]}{unit}"


def gib_text(count: int) -> str:
    """Bytes in GiB, to three decimals, or to three digits where that shows too little: 0.125 GiB, 0.000126 GiB."""
    return f"{gib_number(count / _GIB)} GiB"


def gib_number(gib: float, like: float | None = None) -> str:
    """A number of GiB without the unit: three decimals, or three digits where that shows too little.

    Args:
        gib: The number of GiB.
        like: Another number of GiB whose decimals are taken, so that a deviation matches its mean.
    """
    size = gib if like is None else like
    decimals = 3 if size >= 0.1 or size <= 0 else 2 - math.floor(math.log10(size))
    return f"{gib:.{decimals}f}"


def parse_amount(text: str, option: str) -> float:
    """An amount that a person wrote ('500MB', '2GiB', '1e9' or '80G') as a number; `option` is named in a refusal."""
    units = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
    cleaned = text.strip().lower().removesuffix("flops").removesuffix("b").strip()
    number = cleaned.rstrip("kmgti")
    try:
        value = float(number) * units[cleaned[len(number) :]]
    except (ValueError, KeyError):
        raise InputError(f"{option} {text} is not possible: give an amount such as 500MB, 2GiB or 8e9.") from None
    if not value > 0:
        raise InputError(f"{option} {text} is not possible: give an amount above 0.")
    return value

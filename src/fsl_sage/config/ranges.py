"""Which numbers an option accepts."""

import math
from collections.abc import Mapping
from typing import Any

from fsl_sage.errors import InputError

Range = tuple[str, float, float]
"""What is accepted, in words; the least and the greatest value."""

ABOVE_ZERO = math.ulp(0.0)
WHOLE: Range = ("a whole number from 1 up", 1, 2**62)
RATE: Range = ("a number above 0", ABOVE_ZERO, math.inf)
BELOW_ONE: Range = ("a number from 0 to below 1", 0, 1 - 1e-9)
FROM_ZERO: Range = ("a number from 0 up", 0, math.inf)
ALPHA: Range = ("a number from 0.01 to 10000", 0.01, 1e4)
ROUND: Range = ("a round, from 0 up", 0, 2**62)


def option(path: str) -> str:
    """A field's name on the command line: `data.train_images` is `--data.train-images`."""
    return "--" + path.replace("_", "-")


def check_ranges(holder: Any, ranges: Mapping[str, Range]) -> None:
    """Refuse a number that is out of its range.

    Args:
        holder: A dataclass of options.
        ranges: By the path of an option (`data.alpha`), what it accepts. None is always accepted.
    """
    for path, accepted in ranges.items():
        value: Any = holder
        for name in path.split("."):
            value = getattr(value, name)
        if value is not None:
            check_range(option(path), value, accepted)


def check_range(name: str, value: float, accepted: Range) -> None:
    """Refuse a number that is out of its range; `name` is the option as a person gives it."""
    words, low, high = accepted
    if low <= value <= high and math.isfinite(value):
        return
    if value > high:  # "from 0 up" would not tell what is wrong
        words = words.replace(" up", f" to {high}")
    raise InputError(f"{name} {_told(value)} is not possible: give {words}.")


def _told(value: float) -> str:
    """A number as a sentence has it; a whole number in full, unless it fills the line."""
    if not isinstance(value, int):
        return f"{value:g}"
    return str(value) if abs(value) < 10**40 else "of so many digits"

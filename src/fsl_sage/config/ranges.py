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
    for path, (accepted, low, high) in ranges.items():
        value: Any = holder
        for name in path.split("."):
            value = getattr(value, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise InputError(f"{option(path)} {_told(value)} is not possible: give {accepted}.")


def _told(value: float) -> str:
    """A number as a sentence has it; a whole number may be beyond all floats."""
    return "of so many digits" if isinstance(value, int) and abs(value) >= 2**1023 else f"{value:g}"

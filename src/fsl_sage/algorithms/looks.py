"""How algorithms are called and coloured in every figure and table."""

import zlib
from collections.abc import Mapping
from typing import Any

from fsl_sage.algorithms.names import ALGORITHMS, known_algorithm

# For algorithms without a colour of their own: Tol's muted palette, which colour-blind people can tell apart.
_MORE = ("#332288", "#117733", "#44AA99", "#88CCEE", "#999933", "#CC6677", "#882255", "#AA4499")


def place_of(name: str) -> int:
    """The place of an algorithm in every legend and table; those of other packages come behind, in a fixed order."""
    known = list(ALGORITHMS)
    return known.index(name) if name in known else len(known) + zlib.crc32(name.encode()) % 97


def title_of(name: str) -> str:
    """An algorithm's name for people."""
    return _look(name).get("title") or name.rpartition(":")[2]


def colour_of(name: str) -> str:
    """An algorithm's colour in every figure: its own, or one of a palette by its place."""
    return _look(name).get("colour") or _MORE[place_of(name) % len(_MORE)]


def _look(name: str) -> Mapping[str, Any]:
    """What the class itself says, not what it inherits: two algorithms must not look the same."""
    kind = known_algorithm(name)
    return vars(kind) if kind else {}

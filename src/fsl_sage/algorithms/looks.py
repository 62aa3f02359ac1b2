"""How algorithms are called and coloured in every figure and table.

A name may have a switch of the algorithm's behind it, `splitfed-ss --joint-step`: a variant, which looks like the
algorithm and is called apart.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from fsl_sage.algorithms.names import ALGORITHMS, known_algorithm

# For algorithms without a colour of their own: Tol's muted palette, which colour-blind people can tell apart.
_MORE = ("#332288", "#117733", "#44AA99", "#88CCEE", "#999933", "#CC6677", "#882255", "#AA4499")


_SWITCH = " --"


def variant_of(name: str, switches: Sequence[str]) -> str:
    """An algorithm with some of its options switched on."""
    return "".join([name, *(_SWITCH + switch.replace("_", "-") for switch in switches)])


def algorithm_of(name: str) -> str:
    """The algorithm of which a name is a variant, or itself."""
    return name.partition(_SWITCH)[0]


def place_of(name: str) -> int:
    """The place of an algorithm in every legend and table; those of other packages come behind, in a fixed order."""
    name = algorithm_of(name)
    known = list(ALGORITHMS)
    return known.index(name) if name in known else len(known) + zlib.crc32(name.encode()) % 97


def title_of(name: str) -> str:
    """An algorithm's name for people, with the switches of a variant."""
    algorithm, *switches = name.split(_SWITCH)
    title = _look(algorithm).get("title") or algorithm.rpartition(":")[2]
    return ", ".join([title, *(switch.replace("-", " ") for switch in switches)])


def colour_of(name: str) -> str:
    """An algorithm's colour in every figure: its own, or one of a palette by its place."""
    return _look(name).get("colour") or _MORE[place_of(name) % len(_MORE)]


def _look(name: str) -> Mapping[str, Any]:
    """What the class itself says, not what it inherits: two algorithms must not look the same."""
    kind = known_algorithm(algorithm_of(name))
    return vars(kind) if kind else {}

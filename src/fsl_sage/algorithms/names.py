"""From an algorithm's name to its class: `fedgkt` is the class that `algorithms/fedgkt.py` defines."""

import inspect
import pkgutil
import sys
from collections import UserDict
from collections.abc import Callable, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fsl_sage.algorithms.base import Algorithm
from fsl_sage.algorithms.checks import check_class
from fsl_sage.errors import InputError, nearest
from fsl_sage.own_modules import import_own

SHOWN_FIRST = ("fsl-sage", "lazy-fsl-sage", "cse-fsl", "splitfed-ms", "splitfed-ss", "fedavg")
"""The paper's, in the order of tables and figures. The others follow in alphabetical order."""
_SHARED = ("base", "checks", "joint", "looks", "names", "options", "relay", "splitfed")
"""Modules of this folder that are no algorithm."""


class _Algorithms(UserDict[str, Any]):
    """The algorithms by name. The names are those of the files; a file is imported when its class is asked for."""

    def __getitem__(self, name: str) -> type[Algorithm]:
        if self.data[name] is None:
            self.data[name] = _class_in(f"{__package__}.{name.replace('-', '_')}")
        return self.data[name]


def _names() -> list[str]:
    """The names of the folder's algorithms, in the order in which they are shown."""
    files = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])} - {*_SHARED}
    names = sorted(file.replace("_", "-") for file in files)
    return [*SHOWN_FIRST, *(name for name in names if name not in SHOWN_FIRST)]


def _class_in(module: str) -> type[Algorithm]:
    """The one algorithm that a module defines; what it imports does not count."""
    kinds = [
        kind
        for _, kind in inspect.getmembers(import_module(module), inspect.isclass)
        if issubclass(kind, Algorithm) and kind.__module__ == module
    ]
    if len(kinds) != 1:
        raise InputError(f"{module} must define one class that derives from Algorithm; it defines {len(kinds)}.")
    return kinds[0]


ALGORITHMS: MutableMapping[str, type[Algorithm]] = _Algorithms(dict.fromkeys(_names()))
"""The algorithms of the package by name."""


def find_algorithm(name: str) -> type[Algorithm]:
    """The class that a name means: one of the package's, or MODULE:CLASS, which is imported."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if not is_own(name):
        raise InputError(
            f"--algorithm {name} is not known{nearest(name, [*ALGORITHMS, 'MODULE:CLASS'], '; there are')}"
        )
    kind = import_own(name, "--algorithm")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise InputError(f"--algorithm {name} is not an Algorithm: give a class that derives from fsl_sage.Algorithm.")
    check_class(name, kind)
    return kind


def known_algorithm(name: str) -> type[Algorithm] | None:
    """The class that a name means; None where it is not known, as of a run that somebody else has recorded.

    Nothing is imported for it: the name may be written in a run directory, which is read as data. A class of the user's
    own is known where it has been imported already, as by the comparison that runs it.
    """
    if is_own(name) and name.partition(":")[0] not in sys.modules:
        return None
    try:
        return find_algorithm(name)
    except InputError:
        return None


def names_where(has: Callable[[type[Algorithm]], bool]) -> list[str]:
    """The names of the package's algorithms that have something, for sentences that say which to take instead."""
    return [name for name, kind in ALGORITHMS.items() if has(kind)]


def is_own(name: str) -> bool:
    """Whether a name says MODULE:CLASS, a class of the user's own."""
    return ":" in name and name not in ALGORITHMS

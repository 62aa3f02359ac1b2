"""The algorithms, by name."""

from fsl_sage.algorithms.base import Algorithm, LocalRound, NoOptions
from fsl_sage.algorithms.names import (
    ALGORITHMS,
    find_algorithm,
    is_own,
    names_where,
)
from fsl_sage.algorithms.options import make_algorithm, option_fields, resolve

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "LocalRound",
    "NoOptions",
    "find_algorithm",
    "is_own",
    "make_algorithm",
    "names_where",
    "option_fields",
    "resolve",
]

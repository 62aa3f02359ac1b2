"""The algorithms, by name."""

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.algorithms.cse_fsl import CSEFSL
from fsl_sage.algorithms.fedavg import FedAvg
from fsl_sage.algorithms.fsl_sage import FSLSAGE
from fsl_sage.algorithms.splitfed_ms import SplitFedMS
from fsl_sage.algorithms.splitfed_ss import SplitFedSS
from fsl_sage.config import Config
from fsl_sage.errors import InputError

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fsl-sage": FSLSAGE,
    "lazy-fsl-sage": FSLSAGE,  # with --align-until, which the configuration requires
    "cse-fsl": CSEFSL,
    "splitfed-ms": SplitFedMS,
    "splitfed-ss": SplitFedSS,
    "fedavg": FedAvg,
}


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm that the configuration names."""
    if config.algorithm not in ALGORITHMS:
        names = ", ".join(ALGORITHMS)
        raise InputError(f"--algorithm {config.algorithm} is not known: give one of {names}.")
    return ALGORITHMS[config.algorithm](config)


__all__ = ["ALGORITHMS", "Algorithm", "LocalRound", "make_algorithm"]

"""From an algorithm's name to its class."""

from dataclasses import fields, is_dataclass

from fsl_sage.algorithms.adaptsfl import AdaptSFL
from fsl_sage.algorithms.base import Algorithm
from fsl_sage.algorithms.cpsl import CPSL
from fsl_sage.algorithms.cse_fsl import CSEFSL
from fsl_sage.algorithms.fedadam import FedAdam
from fsl_sage.algorithms.fedavg import FedAvg
from fsl_sage.algorithms.fedgkt import FedGKT
from fsl_sage.algorithms.fedprox import FedProx
from fsl_sage.algorithms.fedyogi import FedYogi
from fsl_sage.algorithms.fsl_sage import FSLSAGE, LazyFSLSAGE
from fsl_sage.algorithms.heron_sfl import HERONSFL
from fsl_sage.algorithms.local_loss import LocalLoss
from fsl_sage.algorithms.locfedmix_sl import LocFedMixSL
from fsl_sage.algorithms.scaffold import Scaffold
from fsl_sage.algorithms.sl import SL
from fsl_sage.algorithms.splitfed_ms import SplitFedMS
from fsl_sage.algorithms.splitfed_ss import SplitFedSS
from fsl_sage.config import Config, option
from fsl_sage.errors import InputError, nearest
from fsl_sage.own_modules import import_own

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fsl-sage": FSLSAGE,
    "lazy-fsl-sage": LazyFSLSAGE,
    "cse-fsl": CSEFSL,
    "splitfed-ms": SplitFedMS,
    "splitfed-ss": SplitFedSS,
    "fedavg": FedAvg,
    "sl": SL,
    "local-loss": LocalLoss,
    "cpsl": CPSL,
    "adaptsfl": AdaptSFL,
    "heron-sfl": HERONSFL,
    "fedgkt": FedGKT,
    "locfedmix-sl": LocFedMixSL,
    "fedprox": FedProx,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "scaffold": Scaffold,
}


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
    if missing := sorted(kind.__abstractmethods__):
        raise InputError(f"--algorithm {name} lacks {' and '.join(missing)}: define it in {kind.__name__}.")
    _check_options(name, kind.Options)
    return kind


def known_algorithm(name: str) -> type[Algorithm] | None:
    """The class that a name means; None where it cannot be found, as of a run that somebody else has recorded."""
    try:
        return find_algorithm(name)
    except InputError:
        return None


def is_own(name: str) -> bool:
    """Whether a name says MODULE:CLASS, a class of the user's own."""
    return ":" in name and name not in ALGORITHMS


def _check_options(name: str, kind: type) -> None:
    if not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise InputError(f"The Options of {name} must be a dataclass with frozen=True.")
    taken = {each.name for each in fields(Config)} & {each.name for each in fields(kind)}
    if taken:
        raise InputError(
            f"{', '.join(sorted(map(option, taken)))} is an option of every run, so it cannot be one of {name} too: "
            "give it another name."
        )

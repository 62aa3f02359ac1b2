"""A second implementation of the algorithms in plain PyTorch, naive on purpose, to compare the package with."""

from collections.abc import Callable

from tests.oracles.cse_fsl import cse_fsl
from tests.oracles.fedavg import fedavg
from tests.oracles.fsl_sage import fsl_sage
from tests.oracles.given import Found, Given
from tests.oracles.splitfed import splitfed_ms, splitfed_ss

ORACLES: dict[str, Callable[[Given], Found]] = {
    "fedavg": fedavg,
    "splitfed-ms": splitfed_ms,
    "splitfed-ss": splitfed_ss,
    "cse-fsl": cse_fsl,
    "fsl-sage": fsl_sage,
}

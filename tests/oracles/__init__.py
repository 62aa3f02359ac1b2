"""A second implementation of the algorithms in plain PyTorch, naive on purpose, to compare the package with."""

from collections.abc import Callable

from tests.oracles.adaptsfl import adaptsfl
from tests.oracles.cpsl import cpsl
from tests.oracles.cse_fsl import cse_fsl
from tests.oracles.fedavg import fedavg
from tests.oracles.fedgkt import fedgkt
from tests.oracles.fsl_sage import fsl_sage
from tests.oracles.given import Found, Given
from tests.oracles.heron import heron_sfl
from tests.oracles.joint import splitfed_ss_joint
from tests.oracles.local_loss import local_loss
from tests.oracles.locfedmix import locfedmix_sl
from tests.oracles.sl import sl
from tests.oracles.splitfed import splitfed_ms, splitfed_ss

ORACLES: dict[str, Callable[[Given], Found]] = {
    "fedavg": fedavg,
    "splitfed-ms": splitfed_ms,
    "splitfed-ss": splitfed_ss,
    "cse-fsl": cse_fsl,
    "fsl-sage": fsl_sage,
    "heron-sfl": heron_sfl,
    "fedgkt": fedgkt,
    "locfedmix-sl": locfedmix_sl,
}

FAMILY: dict[str, Callable[[Given], Found]] = {
    "sl": sl,
    "local-loss": local_loss,
    "splitfed-ss-joint": splitfed_ss_joint,
    "locfedmix-sl": locfedmix_sl,
    "cpsl": cpsl,
    "adaptsfl": adaptsfl,
    "fedgkt": fedgkt,
    "heron-sfl": heron_sfl,
}
"""The rest of the family. Some need fields of `Given` that those above do not have."""

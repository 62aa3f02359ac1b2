"""FedProx (Li et al., 2020): FedAvg whose clients are held near the averaged weights."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fsl_sage.algorithms.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with `--averaging.proximal`, mu; it is 0.01 if not given."""

    title = "FedProx"
    colour = "#BCBD22"
    averages_with: ClassVar[Mapping[str, Any]] = {"proximal": 0.01}

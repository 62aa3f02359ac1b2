"""SCAFFOLD (Karimireddy et al., 2020): FedAvg whose clients correct their drift by control variates."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fsl_sage.algorithms.fedavg import FedAvg


class Scaffold(FedAvg):
    """FedAvg with `--averaging.control-variates`. Each model travels with a control of the size of its weights."""

    title = "SCAFFOLD"
    colour = "#5C4033"
    averages_with: ClassVar[Mapping[str, Any]] = {"control_variates": True}

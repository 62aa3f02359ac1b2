"""FedAdam (Reddi et al., 2021): FedAvg whose F-server takes a step of Adam towards the average."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fsl_sage.algorithms.fedavg import FedAvg


class FedAdam(FedAvg):
    """FedAvg with `--averaging.optimizer adam`."""

    title = "FedAdam"
    colour = "#8B0000"
    averages_with: ClassVar[Mapping[str, Any]] = {"optimizer": "adam"}

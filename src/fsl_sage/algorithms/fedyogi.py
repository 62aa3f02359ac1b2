"""FedYogi (Reddi et al., 2021): FedAvg whose F-server takes a step of Yogi towards the average."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fsl_sage.algorithms.fedavg import FedAvg


class FedYogi(FedAvg):
    """FedAvg with `--averaging.optimizer yogi`."""

    title = "FedYogi"
    colour = "#E377C2"
    averages_with: ClassVar[Mapping[str, Any]] = {"optimizer": "yogi"}

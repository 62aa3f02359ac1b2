"""The models by name, and what the rest of the package needs to know of their layers."""

from collections.abc import Callable

from torch import nn

from fsl_sage.models.conv import Conv2d
from fsl_sage.models.norm import batch_statistics, replace_batch_norm, statistics_names
from fsl_sage.models.resnet import ResNet18
from fsl_sage.models.small_cnn import SmallCNN

MODELS: dict[str, Callable[[int, int], nn.Module]] = {"resnet18": ResNet18, "small-cnn": SmallCNN}
"""Each takes the number of classes and of image channels."""

DEFAULT_CUT = {"resnet18": "layer2", "small-cnn": "block1"}
"""The last module of the client's part."""

__all__ = [
    "DEFAULT_CUT",
    "MODELS",
    "Conv2d",
    "ResNet18",
    "SmallCNN",
    "batch_statistics",
    "replace_batch_norm",
    "statistics_names",
]

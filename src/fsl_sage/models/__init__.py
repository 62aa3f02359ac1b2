"""The models by name, and what the rest of the package needs to know of their layers."""

from fsl_sage.models.conv import Conv2d
from fsl_sage.models.factory import DEFAULT_CUT, MODELS, check_model_name, make_model
from fsl_sage.models.norm import batch_statistics, replace_batch_norm, statistics_names
from fsl_sage.models.resnet import ResNet18
from fsl_sage.models.small_cnn import SmallCNN

__all__ = [
    "DEFAULT_CUT",
    "MODELS",
    "Conv2d",
    "ResNet18",
    "SmallCNN",
    "batch_statistics",
    "check_model_name",
    "make_model",
    "replace_batch_norm",
    "statistics_names",
]

"""The models by name, and what the rest of the package needs to know of their layers."""

from fsl_sage.models.conv import Conv2d
from fsl_sage.models.decoder import Decoder
from fsl_sage.models.factory import DEFAULT_CUT, MODELS, check_model_name, make_model, usual_auxiliary, usual_cut
from fsl_sage.models.language import (
    blocks_name,
    input_embedding,
    is_language_model,
    is_trained_in_auxiliary,
    make_base_model,
    make_language_model,
    mask_buffers,
    save_adapters,
    tokenizer_path,
    train_auxiliary,
)
from fsl_sage.models.layout import AdaptiveAvgPool2d, MaxPool2d
from fsl_sage.models.norm import BatchNorm2d, batch_statistics, replace_batch_norm, statistics_names
from fsl_sage.models.resnet import ResNet18
from fsl_sage.models.small_cnn import SmallCNN
from fsl_sage.models.text_classifier import make_text_classifier, usual_text_cut

__all__ = [
    "DEFAULT_CUT",
    "MODELS",
    "AdaptiveAvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "Decoder",
    "MaxPool2d",
    "ResNet18",
    "SmallCNN",
    "batch_statistics",
    "blocks_name",
    "check_model_name",
    "input_embedding",
    "is_language_model",
    "is_trained_in_auxiliary",
    "make_base_model",
    "make_language_model",
    "make_model",
    "make_text_classifier",
    "mask_buffers",
    "replace_batch_norm",
    "save_adapters",
    "statistics_names",
    "tokenizer_path",
    "train_auxiliary",
    "usual_auxiliary",
    "usual_cut",
    "usual_text_cut",
]

"""Training and evaluation mode of a model's modules."""

from torch import nn


def pin_evaluation(model: nn.Module) -> None:
    """Let modules that whoever made the model has put into evaluation stay there, such as a frozen BatchNorm.

    Training switches whole parts between the modes. A model that is in evaluation as a whole, as pretrained ones come,
    is trained as a whole.
    """
    if model.training:
        for module in model.modules():
            if not module.training:
                module.__dict__["train"] = _stay


def is_pinned(module: nn.Module) -> bool:
    """Whether a module stays in evaluation."""
    return "train" in module.__dict__


def _stay(mode: bool = True) -> None:
    """Stands in the place of `train`, which `eval` calls too. What it returns nobody reads."""

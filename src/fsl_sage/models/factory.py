"""From a model's name to the model: a built-in one, a Hugging Face architecture, or a factory of the user's own."""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsl_sage.errors import InputError, MissingExtra, described, nearest
from fsl_sage.models.foreign import LOCAL_WEIGHTS, check_weights, has_weights, read_config, reason
from fsl_sage.models.language import blocks_name, is_language_model
from fsl_sage.models.resnet import ResNet18
from fsl_sage.models.small_cnn import SmallCNN
from fsl_sage.own_modules import import_own
from fsl_sage.reading import read_json

MODELS: dict[str, Callable[..., nn.Module]] = {"resnet18": ResNet18, "small-cnn": SmallCNN}
"""Each is called with the number of `classes` and of image `channels`, as far as it has parameters of these names."""

DEFAULT_CUT = {"resnet18": "layer2", "small-cnn": "block1"}
"""The last module of the client's part."""

DEFAULT_AUXILIARY, LANGUAGE_AUXILIARY = "blocks:1", "blocks:3"
"""The paper's auxiliaries: layer3 of ResNet-18, the first three server blocks of GPT-2 medium."""


def check_model_name(name: str) -> None:
    """Refuse what cannot be a model's name, before anything slow."""
    if name not in MODELS and ":" not in name:
        accepted = [*MODELS, "hf:ARCHITECTURE", "hf:PATH", "MODULE:FACTORY"]
        raise InputError(f"--model.name {name} is not known{nearest(name, accepted, '; there are')}")


def make_model(name: str, classes: int, image: tuple[int, int, int]) -> nn.Module:
    """The unsplit model with fresh weights (those of the directory for an hf:PATH that has some).

    A factory is called with `classes` and `channels`, as far as it has parameters of these names.
    """
    check_model_name(name)
    if name.startswith("hf:") and name not in MODELS:
        return _hugging_face(name.removeprefix("hf:"), classes, image)
    factory = MODELS[name] if name in MODELS else import_own(name, "--model.name")
    return _called(name, factory, {"classes": classes, "channels": image[0]})


def usual_cut(name: str, model: nn.Module) -> str | None:
    """Where the model is cut if nothing is said: after a language model's first block; None where that is not known."""
    if is_language_model(model):
        return f"{blocks_name(model)}.0"
    return DEFAULT_CUT.get(name)


def usual_auxiliary(model: nn.Module) -> str:
    """The auxiliary if nothing is said."""
    return LANGUAGE_AUXILIARY if is_language_model(model) else DEFAULT_AUXILIARY


def _called(name: str, factory: Any, offered: dict[str, int]) -> nn.Module:
    if not callable(factory):
        raise InputError(f"--model.name {name} is no class and no function: give one that makes a model.")
    wanted = inspect.signature(factory).parameters
    _refuse_unmet(name, wanted, offered)
    try:
        model = factory(**{key: value for key, value in offered.items() if key in wanted})
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--model.name {name} failed to make a model: {described(error)}.") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"--model.name {name} gave a {type(model).__name__}; it must give a torch.nn.Module.")
    return model


def _refuse_unmet(name: str, wanted: Mapping[str, inspect.Parameter], offered: Collection[str]) -> None:
    """Refuse a factory with required parameters that are not given."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for key, parameter in wanted.items():
        if key not in offered and parameter.default is parameter.empty and parameter.kind not in several:
            raise InputError(
                f"--model.name {name} needs '{key}': a factory is given {' and '.join(offered)}, as far as it asks for "
                "them, so give all else a default."
            )


def _hugging_face(what: str, classes: int, image: tuple[int, int, int]) -> nn.Module:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageClassification
    except ImportError:
        raise MissingExtra(f"--model.name hf:{what}", "llm") from None
    path = Path(what)
    # A folder may happen to have the name of an architecture: a run's own, for instance.
    local = path.exists() and (what not in CONFIG_MAPPING or _holds_model(path))
    try:
        config = read_config(path) if local else AutoConfig.for_model(what)
        _fit(config, classes, image)
    except InputError:
        raise
    except (ValueError, OSError) as error:
        said = str(error).split("\n")[0].split(". Should")[0][:200]
        raise InputError(f"--model.name hf:{what} is neither an architecture nor a directory: {said}") from None
    except Exception as error:
        raise InputError(f"--model.name hf:{what} cannot be read: {reason(error)}") from None
    with_data = torch.get_default_device().type != "meta"
    given = with_data and local and path.is_dir() and has_weights(path)
    if given:
        check_weights(path)
    try:
        if given:
            kept = {**LOCAL_WEIGHTS, "ignore_mismatched_sizes": True}
            model = AutoModelForImageClassification.from_pretrained(path, config=config, **kept)
        else:
            model = AutoModelForImageClassification.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except ValueError as error:
        said = str(error).split("\n")[0].split(".")[0]
        raise InputError(f"--model.name hf:{what} has no form for image classification: {said}.") from None
    except Exception as error:  # what is wrong with a file, transformers and safetensors report by many types
        raise InputError(f"--model.name hf:{what} cannot be made: {reason(error)}") from None
    assert isinstance(model, nn.Module)
    return model


def _holds_model(path: Path) -> bool:
    """Whether a folder has a model's configuration as transformers writes it."""
    file = path / "config.json"
    written = read_json(file) if file.is_file() else None
    return isinstance(written, dict) and "model_type" in written


def _fit(config: Any, classes: int, image: tuple[int, int, int]) -> None:
    """Set what follows from the data."""
    config.num_labels = classes
    if hasattr(config, "num_channels"):
        config.num_channels = image[0]
    if hasattr(config, "image_size"):
        config.image_size = image[1]

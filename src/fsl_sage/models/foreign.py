"""Directories of transformers that others made: their weights are read, their code and their pickles never."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fsl_sage.errors import InputError
from fsl_sage.reading import read_json, short

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""From this machine, and without the Python files that a directory may bring and transformers would offer to run."""
LOCAL_WEIGHTS: dict[str, Any] = {**LOCAL, "use_safetensors": True}

_PICKLED = "pytorch_model*.bin"


MOST_LAYERS = 10_000
"""No model has more: one that says so would only be built for hours."""


def read_config(path: Path) -> Any:
    """The configuration in a directory of transformers, which is looked at first.

    Args:
        path: The directory, or the file config.json itself.

    Returns:
        A PretrainedConfig. Whatever transformers raises on a file that is not as it should be goes through.
    """
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    written = read_json(file) if file.is_file() else None
    _refuse_kernels(written)
    config = AutoConfig.from_pretrained(path, **LOCAL)
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise InputError(f"{file} says that the model has {layers:,} layers, more than {MOST_LAYERS:,}.")
    return config


def _refuse_kernels(written: Any) -> None:
    """Refuse a configuration that names a kernel of a repository, which transformers would fetch and run."""
    for key, value in written.items() if isinstance(written, dict) else ():
        if key.endswith("_implementation") and "/" in str(value):
            raise InputError(f"config.json asks for code of the repository {short(value)} as its {key}: take that out.")
        _refuse_kernels(value)


def reason(error: Exception) -> str:
    """What transformers says of files that it cannot use: its first line, and the kind, for some say only a name."""
    return f"{type(error).__name__}: {short(str(error).strip().partition(chr(10))[0])}"


def has_weights(path: Path) -> bool:
    """Whether a directory has weights of any format."""
    return any(any(path.glob(pattern)) for pattern in ("*.safetensors", _PICKLED))


def check_weights(path: Path) -> None:
    """Refuse a directory without weights, which must not be taken for random ones, and weights in a pickle."""
    if not has_weights(path):
        raise InputError(f"{path} has a model's configuration but no weights: there is no *.safetensors in it.")
    if not any(path.glob("*.safetensors")):
        raise InputError(
            f"{path} has its weights in {_PICKLED}, a format that can run code: convert them, if you trust who made "
            f"them, by 'fsl-sage data convert {path}'."
        )


def convert_weights(path: Path) -> Path:
    """Write the weights of a directory's pytorch_model*.bin as model.safetensors; a pickle gives only tensors."""
    files, written = sorted(path.glob(_PICKLED)), path / "model.safetensors"
    if not files:
        raise InputError(f"There is no {_PICKLED} in {path}: give the directory of a model.")
    if written.exists():
        raise InputError(f"{written} is there already: remove it to convert once more.")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= _tensors_in(file)
    try:
        safetensors.torch.save_file(weights, written, {"format": "pt"})
    except OSError as error:
        raise InputError(f"{written} cannot be written: {error.strerror or error}.") from None
    return written


def _tensors_in(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
        # A copy of each: safetensors refuses tensors that share memory, as tied ones do.
        return {str(name): tensor.detach().clone().contiguous() for name, tensor in found.items()}
    except Exception as error:  # torch reports damage and forbidden objects by many types
        reason = str(error).split("\n")[0][:200]
        raise InputError(f"{file} does not hold a model's weights and nothing else: {reason}") from None

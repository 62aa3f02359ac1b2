"""Directories of transformers that others made: their weights are read, their code and their pickles never."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fsl_sage.errors import InputError

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""From this machine, and without the Python files that a directory may bring and transformers would offer to run."""
LOCAL_WEIGHTS: dict[str, Any] = {**LOCAL, "use_safetensors": True}

_PICKLED = "pytorch_model*.bin"


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

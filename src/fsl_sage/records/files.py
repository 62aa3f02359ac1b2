"""Writing files so that a reader never sees half of one, whatever happens to the writer."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fsl_sage.errors import InputError
from fsl_sage.wire.message import Tensors


def write_bytes(path: Path, content: bytes) -> None:
    """Write next to the place, flush to disk, then move into place."""
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def as_file_name(text: str) -> str:
    """A text as a part of a file's name: `mine:Anchored` is `mine-Anchored`."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-")


def write_json(path: Path, value: Any) -> None:
    """Indented, for people."""
    write_bytes(path, (json.dumps(value, indent=2, default=str) + "\n").encode())


def save_tensors(path: Path, tensors: Mapping[str, Tensor], values: Any = None) -> None:
    """One safetensors file with named tensors and plain values; a tensor under several names is written once."""
    first: dict[tuple[int, Any, Any], str] = {}
    same: dict[str, str] = {}
    distinct: Tensors = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            same[name] = first[key]
        else:
            first[key] = name
            distinct[name] = tensor.detach().cpu().contiguous()
            if distinct[name].untyped_storage().nbytes() != distinct[name].numel() * distinct[name].element_size():
                distinct[name] = distinct[name].clone()  # a view of something larger
    metadata = {"values": json.dumps(values), "same": json.dumps(same)}
    write_bytes(path, safetensors.torch.save(distinct, metadata))


def load_tensors(path: Path) -> tuple[Tensors, Any]:
    """The tensors and values that `save_tensors` wrote."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read, it is damaged or not a safetensors file: {error}.") from None
    for name, original in json.loads(metadata.get("same", "{}")).items():
        tensors[name] = tensors[original]
    return tensors, json.loads(metadata.get("values", "null"))

"""What a site needs to build its parts, besides the weights that are trained. It is sent once.

A site builds the structure of its parts on the meta device, from the configuration alone, and holds nothing of the
other parts. The foundation adds what the site cannot know: where the server has cut the model, the frozen weights of
the client's parts, and what constructors have computed, such as rotary frequencies (see `split.parts.fixed`).

Small tensors travel in the foundation itself. Of large ones it has only the SHA-256. They come in chunks before
the first round, or are in files at the site; `weight_store` keeps them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fsl_sage.engines.base import Setup
from fsl_sage.errors import InputError
from fsl_sage.split import Part, SplitError, SplitPlan, fixed_tensors, passage, set_fixed
from fsl_sage.split.plan.split_plan import dtype_name, dtype_of
from fsl_sage.wire.message import Tensors, nbytes
from fsl_sage.wire.paths import below, flat

SMALL = 2**22
"""Bytes of fixed tensors that travel with a client's first message; more come before it, in chunks."""
SCALAR = 2**12
"""A tensor of at most so many bytes always travels with the foundation."""


@dataclass(frozen=True)
class Large:
    """A tensor that is too large for the foundation and is sent before it."""

    sha256: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return torch.Size(self.shape).numel() * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Foundation:
    """The plan of the split, the fixed tensors, and their names in the parts."""

    plan: SplitPlan
    small: Tensors
    """The tensors that it contains, by key."""
    large: Mapping[str, Large]
    """The tensors that are sent before it, by key."""
    places: Mapping[str, str]
    """By PART/NAME, the key of the tensor. A tensor that two parts share has one key."""

    @classmethod
    def of(cls, setup: Setup) -> "tuple[Foundation, Tensors]":
        """The foundation of every client of a run, and the large tensors by their SHA-256."""
        modules = {part: setup.modules[part] for part in setup.algorithm.holds}
        fixed = flat({part: fixed_tensors(module) for part, module in modules.items()})
        keys: dict[Any, str] = {}
        places = {place: keys.setdefault(_identity(tensor), str(len(keys))) for place, tensor in fixed.items()}
        tensors = {places[place]: tensor.cpu().contiguous() for place, tensor in fixed.items()}
        inline = nbytes(tensors) <= SMALL
        small = {key: x for key, x in tensors.items() if inline or x.nbytes <= SCALAR}
        large = {key: _described(x) for key, x in tensors.items() if key not in small}
        # A tensor that has two keys travels once.
        sent = {described.sha256: tensors[key] for key, described in large.items()}
        plan = next(passage(module).plan for module in modules.values() if isinstance(module, Part))
        return cls(plan, small, large, places), sent

    def pack(self) -> bytes:
        """As bytes."""
        about = {
            "plan": self.plan.to_dict(),
            "large": {key: asdict(described) for key, described in self.large.items()},
            "places": self.places,
        }
        # safetensors takes no empty file.
        return safetensors.torch.save({**self.small, "": torch.zeros(0)}, {"foundation": json.dumps(about)})

    @classmethod
    def unpack(cls, block: bytes) -> "Foundation":
        """What `pack` wrote."""
        try:
            length = int.from_bytes(block[:8], "little")
            about = json.loads(json.loads(block[8 : 8 + length])["__metadata__"]["foundation"])
            small = {name: tensor for name, tensor in safetensors.torch.load(block).items() if name}
            large = {key: Large(x["sha256"], x["dtype"], tuple(x["shape"])) for key, x in about["large"].items()}
            return cls(SplitPlan.from_dict(about["plan"]), small, large, about["places"])
        except Exception as error:  # a peer wrote it, and damage shows by many types
            raise InputError(f"The foundation that the server sent cannot be read ({type(error).__name__}).") from None

    def put_in(self, modules: Mapping[str, nn.Module], device: torch.device, large: Callable[[Large], Tensor]) -> None:
        """Give parts that were built on the meta device their fixed tensors.

        Args:
            modules: The parts.
            device: Where the tensors go.
            large: Reads a large tensor.
        """
        tensors = {key: tensor.to(device) for key, tensor in self.small.items()}
        tensors |= {key: large(described).to(device) for key, described in self.large.items()}
        placed = {place: tensors[key] for place, key in self.places.items()}
        for part, module in modules.items():
            try:
                set_fixed(module, below(f"{part}/", placed))
            except SplitError as error:
                raise InputError(
                    f"The {part} part that this site has built is not the one of the server: {error}. Have the same "
                    "versions of torch and of the model's packages at the server and here."
                ) from None


def sha256_of(tensor: Tensor) -> str:
    """The SHA-256 of the bytes of a tensor's elements."""
    return hashlib.sha256(as_bytes(tensor)).hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without copying them."""
    elements: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(elements)


def _described(tensor: Tensor) -> Large:
    return Large(sha256_of(tensor), dtype_name(tensor.dtype), tuple(tensor.shape))


def _identity(tensor: Tensor) -> Any:
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype) if tensor.numel() else (id(tensor),)

"""A device that is not the CPU, without any hardware: python -m tests.engines.other_device FILE [--single]

Its tensors are wrapped ones of the CPU. As on a GPU, an operation on tensors of two devices is refused, and so is
reading one as NumPy array; only copies go from one to the other. Code that runs on it keeps its tensors together.
FILE has configurations in JSON. Each is run on this device and on the CPU, and both final test losses are printed.
With --single the device has no numbers in double precision, as Apple's.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fsl_sage import precision
from fsl_sage.config import Config
from fsl_sage.experiment import run, setup

aten = torch.ops.aten
NAME = "other"
CPU = torch.device("cpu")
COPIES = (aten._to_copy.default, aten.copy_.default)


class OtherTensor(torch.Tensor):
    """A tensor of the other device; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OtherTensor":
        if inner.dtype == torch.float64 and NAME in precision.NO_FLOAT64:
            raise TypeError(f"{NAME} has no float64")
        strides, offset = inner.stride(), inner.storage_offset()
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=strides, storage_offset=offset, dtype=inner.dtype, device=f"{NAME}:0"
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        return compute(operation, args, options or {})


def compute(operation: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """An operation with tensors of the other device, computed by the CPU."""
    given, structure = pytree.tree_flatten((args, options))
    if operation not in COPIES:
        for x in given:
            if isinstance(x, torch.Tensor) and not isinstance(x, OtherTensor) and x.dim() > 0:
                raise RuntimeError(f"{operation} of tensors on two devices, {NAME} and cpu; that one: {tuple(x.shape)}")
    wrapped = {id(x.inner): x for x in given if isinstance(x, OtherTensor)}
    args_there, options_there = pytree.tree_unflatten([_inside(x) for x in given], structure)
    made = operation(*args_there, **options_there)
    if operation is aten._to_copy.default and torch.device(options.get("device") or args[0].device).type != NAME:
        return made

    def outside(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return wrapped[id(x)] if id(x) in wrapped else OtherTensor(x)

    return pytree.tree_map(outside, made)


def _inside(x: Any) -> Any:
    if isinstance(x, OtherTensor):
        return x.inner
    return CPU if isinstance(x, torch.device) else x


def register() -> torch.library.Library:
    """Make the device known to torch; it is so as long as the result lives."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda operation, *args, **options: compute(operation, args, options), "PrivateUse1")
    # These two read Python's numbers by a way of their own, that no backend in Python can take part in.
    on_cpu, on_own = torch.tensor, torch.Tensor.new_tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        return on_cpu(data, **options).to(device or CPU)

    def new_tensor(self: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
        if self.device.type != NAME:
            return on_own(self, data, **options)
        return on_cpu(data, dtype=options.get("dtype", self.dtype)).to(self.device)

    torch.tensor = tensor  # type: ignore[assignment]
    torch.Tensor.new_tensor = new_tensor  # type: ignore[method-assign,assignment]
    return library


def test_loss(config: Config, device: str) -> float:
    """The final test loss of a run on a device."""
    setup.pick_device = lambda name: torch.device(device)  # type: ignore[assignment]
    return float(run(config).metrics[-1]["test_loss"])


def main() -> None:
    """Run each configuration on both devices."""
    from tests.conftest import tiny_config

    if "--single" in sys.argv:
        precision.NO_FLOAT64.add(NAME)
    library = register()
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for place, changes in enumerate(json.loads(Path(sys.argv[1]).read_text())):
            losses.append([])
            for device in (NAME, "cpu"):
                out = f"{folder}/{place}-{device}"
                losses[-1].append(test_loss(tiny_config({"out": out, **changes}), device))
    del library
    print(json.dumps(losses))


if __name__ == "__main__":
    main()

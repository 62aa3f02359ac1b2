"""The tensors of a part that no training changes and no state_dict has to have.

These are frozen weights, buffers that are not saved, such as rotary frequencies, and tensors that a module keeps as
plain attributes. A part that is built on the meta device has none of their values: a constructor cannot compute there.
So they are taken from the same part of a model that is built with its data, and put in by name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fsl_sage.split.errors import SplitError
from fsl_sage.split.parts.part import Part, passage
from fsl_sage.split.trace.skeleton import set_tensor

_OF_MODULE = frozenset(nn.Module().__dict__)


def fixed_tensors(part: nn.Module) -> dict[str, Tensor]:
    """By name: frozen weights and unsaved buffers as NAME, tensors in plain attributes as NAME or NAME[place]."""
    found: dict[str, Tensor] = {}
    for prefix, module in _modules(part):
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                found[_join(prefix, key)] = parameter.detach()
        for key in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(key)) is not None:
                found[_join(prefix, key)] = buffer.detach()
    absent = passage(part).absent if isinstance(part, Part) else frozenset()
    return found | {name: x.detach() for name, x in _plain(part).items() if name not in absent}


def set_fixed(part: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put in what `fixed_tensors` gave for the same part."""
    wanted = fixed_tensors(part)
    for name in sorted(wanted.keys() ^ tensors.keys()):
        what = "is missing" if name in wanted else "is not part of it"
        raise SplitError(f"the fixed tensors do not fit the part: '{name}' {what}")
    saved = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    saved |= {name for name, _ in part.named_buffers(remove_duplicate=False)}
    for name, tensor in tensors.items():
        if wanted[name].shape != tensor.shape:
            raise SplitError(f"'{name}' has the shape {tuple(wanted[name].shape)}; one of {tuple(tensor.shape)} came")
        if name in saved:
            parameter = nn.Parameter(tensor, requires_grad=False)
            set_tensor(part, name, parameter if _is_parameter(part, name) else tensor)
    _set_plain(part, tensors)


def _is_parameter(part: nn.Module, name: str) -> bool:
    holder, _, key = name.rpartition(".")
    return key in part.get_submodule(holder)._parameters


def _modules(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name. A part's own attributes are those of the model whose code it runs."""
    for name, module in part.named_modules():
        yield name, passage(module).model if isinstance(module, Part) else module


def _plain(part: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, module in _modules(part):
        for key, value in _attributes(module):
            for place, leaf in enumerate(pytree.tree_leaves(value)):
                if isinstance(leaf, Tensor):
                    found[_place(prefix, key, value, place)] = leaf
    return found


def _set_plain(part: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for prefix, module in _modules(part):
        for key, value in _attributes(module):
            leaves, structure = pytree.tree_flatten(value)
            names = [_place(prefix, key, value, place) for place in range(len(leaves))]
            if any(isinstance(leaf, Tensor) and name in tensors for leaf, name in zip(leaves, names, strict=True)):
                put = [tensors.get(name, leaf) for leaf, name in zip(leaves, names, strict=True)]
                module.__dict__[key] = pytree.tree_unflatten(put, structure)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """What a module keeps besides parameters, buffers and modules, as far as there can be tensors in it."""
    skipped = _OF_MODULE | {"_flat_weights"} if isinstance(module, nn.RNNBase) else _OF_MODULE  # these are parameters
    own = ((key, value) for key, value in module.__dict__.items() if key not in skipped)
    return [(key, value) for key, value in own if isinstance(value, Tensor | list | tuple | dict)]


def _place(prefix: str, key: str, value: Any, place: int) -> str:
    name = _join(prefix, key)
    return name if isinstance(value, Tensor) else f"{name}[{place}]"


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key

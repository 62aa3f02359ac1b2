"""Copies of a model's structure that do not copy its weights."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from fsl_sage.split.errors import SplitError


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer; weights tied between modules appear once per module."""
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                tensors[f"{prefix}.{attribute}" if prefix else attribute] = tensor
    return tensors


def skeleton(model: nn.Module, tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> nn.Module:
    """A copy of the module objects whose parameters and buffers are `tensor(original)`, by default the originals.

    What is tied in the model stays tied in the copy. Encoders of torch run without nested tensors, which do not tell
    their sizes; padded positions then have numbers that nobody should read, instead of none.
    """
    originals = named_tensors(model)
    _refuse_lazy(originals)
    memo = {id(original): tensor(original) for original in originals.values()}
    # deepcopy asks the memo before it copies; the list keeps the originals' ids from being reused meanwhile.
    try:
        copied = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise SplitError(
            f"the model cannot be copied: {str(error).splitlines()[0]} It must not keep computed tensors, locks or "
            "files among its attributes; torch.nn.utils.parametrizations has a weight_norm that can be copied"
        ) from error
    for module in copied.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return copied


def _refuse_lazy(tensors: Mapping[str, Tensor]) -> None:
    lazy = next((name for name, tensor in tensors.items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise SplitError(
            f"the model's '{lazy}' has no shape yet, as in torch's lazy modules: let what makes the model run one "
            "example through it before it returns it"
        )


def holder_and_attribute(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor `name`, and the attribute's name in it."""
    holder, _, attribute = name.rpartition(".")
    return model.get_submodule(holder), attribute


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` in the place of the model's parameter or buffer `name`."""
    module, attribute = holder_and_attribute(model, name)
    module.__dict__.pop(attribute, None)
    if isinstance(tensor, nn.Parameter):
        module._parameters[attribute] = tensor
    else:
        module._buffers[attribute] = tensor


def placeholder(shape: Iterable[int], dtype: torch.dtype, device: torch.device, dense: bool = False) -> Tensor:
    """A tensor that has the shape only: NaN, or zero where the type has no NaN, in one element of memory.

    NaN makes visible whatever should not have been read. `dense` gives it memory of its own, for models that write
    into it.
    """
    nan = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if nan else 0
    if dense:
        return torch.full(tuple(shape), value, dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


class Original:
    """What a module ran when it was called, before something else took the place of its `forward`.

    It looks the method up at call time, so that copies and pickles of the module run their own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example stands for: a mapping holds keyword inputs, anything else is positional."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if type(example) is tuple else (example,)), {}


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors in a nested structure, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def own_buffers(tensor: Tensor) -> Tensor:
    """For a skeleton that shares the parameters, and whose buffers may change."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


def without_data(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor that has a device but no data; a tensor on the meta device is taken to be on the CPU."""
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same kind on the meta device."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def built_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without weights. Where its constructor looks at values, each weight goes to the meta device once made."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError):
        pass
    leave = nn.modules.module.register_module_parameter_registration_hook(_weight_on_meta)  # type: ignore[arg-type]
    try:
        model = make()
    finally:
        leave.remove()
    for name, tensor in named_tensors(model).items():
        if not isinstance(tensor, nn.Parameter):
            set_tensor(model, name, on_meta(tensor))
    return model


def _weight_on_meta(module: nn.Module, name: str, weight: nn.Parameter | None) -> Tensor | None:
    return None if weight is None else on_meta(weight)

"""Auxiliary models, derived from the server's part.

An auxiliary runs the server's code with some of its blocks left out. What stands behind the last block, the head, is
kept. Where a block that is left out changes the width, the head's Linear is made anew for the width that arrives, and
where no Linear follows, a small layer is put in the block's place that makes up for the difference.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from fsl_sage.models.attention import twice_differentiable_attention
from fsl_sage.split.plan import SplitError
from fsl_sage.split.rehearsal import SeenCall, calls_behind_the_cut, rehearse
from fsl_sage.split.sides import Boundary, Part, Split, as_boundary, structure_of
from fsl_sage.split.skeleton import Original, named_tensors, set_tensor, skeleton, tensor_leaves

Spec = str | int | nn.Module

ACCEPTED = '"linear", "half", "full", "blocks:N", a share such as "5%", a number of bytes, or an nn.Module'


def auxiliary(split: Split, spec: Spec = "blocks:1", *, aligned: bool = True) -> nn.Module:
    """An auxiliary model: takes the boundary, returns what the server returns.

    Args:
        split: A split at one cut.
        spec: "blocks:N", the server's first N blocks and its head; "linear", the head alone; "half", the first half of
            the first block where that has several blocks inside, else of the server's blocks; "full", the server's
            architecture; "5%", the most that fits into this share of the server's bytes; a number of bytes; or a module
            of your own, which is called with the boundary's tensors.
        aligned: Whether it is to be aligned, which needs double backward. It is then tried once.

    The weights start as copies of the server's; a layer made anew starts at random.
    """
    if "head" in split.plan.parts:
        raise SplitError("a split at two cuts has no auxiliary model: the server does not compute the loss")
    made: nn.Module
    if isinstance(spec, nn.Module):
        made = _OwnAuxiliary(spec)
        _check_output(split, made)
    else:
        made = _derived(split, spec)
    if aligned:
        _try_double_backward(made, split)
    return made


# -- which blocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Consecutive modules that are kept or left out together, and the blocks inside."""

    modules: tuple[SeenCall, ...]
    units: tuple[SeenCall, ...] = ()


def _blocks(calls: list[SeenCall]) -> list[_Block]:
    """The server's blocks: modules made of several that turn features into features, before the last one."""
    holding = [call for call in calls if call.has_parameters]
    composite = [call for call in holding[:-1] if call.is_composite and call.keeps_rank]
    if composite:
        return [_Block((call,), _units(call)) for call in composite]
    blocks: list[list[SeenCall]] = []
    for call in holding[:-1]:  # a norm belongs to the layer before it
        if max(parameter.dim() for parameter in call.module.parameters()) > 1 or not blocks:
            blocks.append([])
        blocks[-1].append(call)
    return [_Block(tuple(block)) for block in blocks]


def _units(call: SeenCall) -> tuple[SeenCall, ...]:
    """The elements of a sequence inside of a block, such as the residual blocks of a stage."""
    inner = [unit for unit in call.inner if unit.container and unit.is_composite and unit.keeps_rank]
    return tuple(inner) if len(inner) > 1 else ()


def _derived(split: Split, spec: str | int) -> nn.Module:
    blocks = _blocks(calls_behind_the_cut(split.server, split.plan.cuts[0], split.example))
    builder = _Builder(split, blocks)
    if isinstance(spec, int) and not isinstance(spec, bool):
        return builder.largest_within(spec)
    text = str(spec).strip().lower()
    if text in ("linear", "full"):
        return builder.build(_left_out(blocks, 0 if text == "linear" else len(blocks)))
    if text == "half":
        return builder.build(_half(blocks))
    if match := re.fullmatch(r"blocks:(\d+)", text):
        if not 0 < int(match[1]) <= len(blocks):
            there = f"{len(blocks)} blocks" if blocks else "no blocks but its head; 'full' or 'linear' is all there is"
            raise SplitError(
                f"the auxiliary '{spec}' asks for {match[1]} blocks; behind the cut the server has {there}"
            )
        return builder.build(_left_out(blocks, int(match[1])))
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        return builder.largest_within(int(float(match[1]) / 100 * _bytes(split.server)))
    raise SplitError(f"the auxiliary '{spec}' is none of {ACCEPTED}")


def _left_out(blocks: list[_Block], kept: int) -> list[SeenCall]:
    return [call for block in blocks[kept:] for call in block.modules]


def _half(blocks: list[_Block]) -> list[SeenCall]:
    if blocks and (units := blocks[0].units):
        return [*units[math.ceil(len(units) / 2) :], *_left_out(blocks, 1)]
    return _left_out(blocks, math.ceil(len(blocks) / 2))


def _steps(blocks: list[_Block]) -> list[list[SeenCall]]:
    """What is left out, from all blocks to none, unit by unit."""
    steps = [_left_out(blocks, 0)]
    for kept, block in enumerate(blocks):
        for units in range(1, len(block.units)):
            steps.append([*block.units[units:], *_left_out(blocks, kept + 1)])
        steps.append(_left_out(blocks, kept + 1))
    return steps


# -- building ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recipe:
    """How to make an auxiliary of the server's part."""

    left_out: tuple[SeenCall, ...]
    linears: tuple[tuple[str, int], ...] = ()
    """Linear layers to make anew, with the number of features that arrive."""
    fitted: tuple[str, tuple[int, ...], tuple[int, ...]] | None = None
    """The module in whose place a fitting layer goes, and the shapes that it takes and returns."""


class _Builder:
    def __init__(self, split: Split, blocks: list[_Block]) -> None:
        self.split = split
        self.blocks = blocks

    def build(self, left_out: list[SeenCall]) -> Part:
        """The auxiliary, with weights of its own."""
        part = self._shared(left_out)
        own = {id(tensor): _own(tensor) for tensor in named_tensors(part).values()}
        for name, tensor in named_tensors(part).items():
            set_tensor(part, name, own[id(tensor)])
        return part

    def largest_within(self, budget: int) -> Part:
        """The auxiliary with the most units whose state takes at most `budget` bytes."""
        steps = _steps(self.blocks)
        smallest = _bytes(self._shared(steps[0]))
        if smallest > budget:
            raise SplitError(
                f"the smallest auxiliary model, 'linear', takes {smallest:,} bytes; {budget:,} were allowed"
            )
        low, high = 0, len(steps) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if _bytes(self._shared(steps[middle])) <= budget else (low, middle - 1)
        return self.build(steps[low])

    def _shared(self, left_out: list[SeenCall]) -> Part:
        """The auxiliary, on the server's own tensors but for what is made anew."""
        part = skeleton(self.split.server)
        assert isinstance(part, Part)
        _apply(part, self._recipe(left_out))
        return part

    def _recipe(self, left_out: list[SeenCall]) -> _Recipe:
        """Try the recipe in which a Linear is made anew, then the one with a fitting layer."""
        if not left_out:
            return _Recipe(())
        try:
            return self._rehearsed(_Recipe(tuple(left_out)))
        except Exception:
            first, last = left_out[0], left_out[-1]
        try:
            return self._rehearsed(_Recipe(tuple(left_out), fitted=(last.name, first.took, last.returned)))
        except Exception as error:
            raise SplitError(
                f"no auxiliary model without '{left_out[0].name}' can be derived ({error}); pass an nn.Module instead"
            ) from error

    def _rehearsed(self, recipe: _Recipe) -> _Recipe:
        """The recipe completed by the Linear layers that do not fit what arrives at them."""

        def run(part: nn.Module, tensors: tuple[Tensor, ...]) -> tuple[tuple[str, int], ...]:
            assert isinstance(part, Part)
            _apply(part, recipe)
            changed: dict[str, int] = {}
            for name, module in part.named_modules():
                if type(module) is nn.Linear:
                    module.__dict__["forward"] = _LinearForAnyWidth(module, name, changed)
            with torch.no_grad():
                part.eval()(tensors)
            return tuple(changed.items())

        linears = rehearse(self.split.server, self.split.plan.cuts[0], self.split.example, run)
        return _Recipe(recipe.left_out, linears, recipe.fitted)


def _own(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _apply(part: Part, recipe: _Recipe) -> None:
    for call in recipe.left_out:
        module = part.get_submodule(call.name)
        part.drop(f"{call.name}.{name}" for name in named_tensors(module))
        module.__dict__["forward"] = _Bypass(module, call)
    if recipe.fitted is not None:
        name, took, returned = recipe.fitted
        module = part.get_submodule(name)
        module.add_module("fit", _like_parameters(_Fit(took, returned), part))
    for name, arriving in recipe.linears:
        linear = part.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        weight = linear.weight
        remade = nn.Linear(arriving, linear.out_features, linear.bias is not None, weight.device, weight.dtype)
        holder, _, attribute = name.rpartition(".")
        part.get_submodule(holder)._modules[attribute] = remade


def _like_parameters(module: nn.Module, part: Part) -> nn.Module:
    parameter = next(part.parameters())
    return module.to(parameter.device, parameter.dtype)


class _Bypass:
    """Stands as `forward` of a block that is left out: hands on the first tensor that it is given."""

    def __init__(self, module: nn.Module, call: SeenCall) -> None:
        self.module = module
        self.structure = call.structure
        self.leaves = call.leaves
        self.main_leaf = call.main_leaf

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensor = tensor_leaves((args, kwargs))[0]
        fit = self.module._modules.get("fit")
        tensor = tensor if fit is None else fit(tensor)
        leaves = [tensor if position == self.main_leaf else leaf for position, leaf in enumerate(self.leaves)]
        return pytree.tree_unflatten(leaves, structure_of(self.structure))


class _Fit(nn.Module):
    """One linear map between the widths of two blocks, after a mean over the map or sequence where that gets smaller.

    Maps are [N, C, H, W], sequences [N, L, C].
    """

    def __init__(self, took: tuple[int, ...], returned: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = returned[2:] if len(returned) == 4 else returned[1:-1]
        channels = 1 if len(returned) == 4 else -1
        self.kernel = tuple(
            max(before // after, 1) for before, after in zip(self._extent(took), self.sizes, strict=True)
        )
        self.weight = nn.Parameter(torch.empty(returned[channels], took[channels]))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @staticmethod
    def _extent(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[2:] if len(shape) == 4 else shape[1:-1]

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return F.conv2d(F.avg_pool2d(x, self.kernel), self.weight[:, :, None, None])
        if x.dim() == 3:
            x = F.avg_pool1d(x.transpose(1, 2), self.kernel).transpose(1, 2)
        return F.linear(x, self.weight)


class _LinearForAnyWidth:
    """Stands as `forward` of a Linear in a rehearsal: takes any width, and notes those that are not its own."""

    def __init__(self, module: nn.Linear, name: str, changed: dict[str, int]) -> None:
        self.original = Original(module)
        self.linear = module
        self.name = name
        self.changed = changed

    def __call__(self, x: Tensor) -> Any:
        if x.shape[-1] == self.linear.in_features:
            return self.original(x)
        self.changed[self.name] = x.shape[-1]
        return x.new_zeros(*x.shape[:-1], self.linear.out_features)


class _OwnAuxiliary(nn.Module):
    """A user's module behind the boundary; its state keeps its own names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_module"] = module
        for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[registry] = module.__dict__[registry]
        self.training = module.training

    def forward(self, *boundary: Any) -> Any:
        return self.__dict__["_module"](*as_boundary(boundary).tensors)

    def train(self, mode: bool = True) -> _OwnAuxiliary:
        self.__dict__["_module"].training = mode
        super().train(mode)
        return self


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_output(split: Split, made: nn.Module) -> None:
    """A user's module must return what the server does: the same shapes in the same order."""
    if split.example is None:
        return
    boundary = split.example.with_tensors(tuple(tensor.detach() for tensor in split.example.tensors))
    copies = copy.deepcopy((split.server, made))
    try:
        with torch.no_grad():
            wanted, got = (list(map(_shape, tensor_leaves(module.eval()(boundary)))) for module in copies)
    except Exception as error:
        raise SplitError(f"the auxiliary module fails on the boundary's tensors: {error}") from error
    if wanted != got:
        raise SplitError(f"the auxiliary module returns tensors of {got}; the server returns {wanted}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _try_double_backward(made: nn.Module, split: Split) -> None:
    missing = _without_double_backward(made, split)
    if missing:
        raise SplitError(
            f"the auxiliary model cannot be aligned: {', '.join(missing)} cannot be differentiated twice; use "
            "other layers there, or pass aligned=False for algorithms that do not align"
        )


def _without_double_backward(made: nn.Module, split: Split) -> list[str]:
    """The operations in the auxiliary's backward pass whose derivative torch does not know."""

    def run(module: nn.Module, tensors: tuple[Tensor, ...]) -> list[str]:
        boundary = Boundary(tensors).detached()
        smashed = [tensor for tensor in boundary.tensors if tensor.requires_grad]
        with torch.enable_grad(), twice_differentiable_attention():
            outputs = [t for t in tensor_leaves(_as_aligned(module, boundary)) if t.requires_grad]
            loss = torch.stack([output.square().mean() for output in outputs]).sum()
            found = torch.autograd.grad(loss, smashed, create_graph=True, allow_unused=True)
            gradients = [gradient for gradient in found if gradient is not None]
            missing = {name for gradient in gradients for name in _missing_from(gradient)}
            return sorted(missing) or _tried(gradients, smashed)

    return rehearse(made, split.plan.cuts[0], split.example, run)


def _tried(gradients: list[Tensor], smashed: list[Tensor]) -> list[str]:
    """Some operations show only when they run that they have no second derivative."""
    distances = [gradient.square().sum() for gradient in gradients if gradient.requires_grad]
    try:
        if distances:
            torch.autograd.grad(torch.stack(distances).sum(), smashed, allow_unused=True)
    except RuntimeError as error:
        if "derivative" not in str(error):
            raise
        return [_operation_in(error)]
    return []


def _as_aligned(module: nn.Module, boundary: Boundary) -> Any:
    """A pass as alignment does it: BatchNorm by the batch, unless one sample is all there is, and no dropout."""
    module.train()
    for inner in module.modules():
        if isinstance(inner, _DropoutNd):
            inner.eval()
    try:
        return module(boundary)
    except ValueError:
        return module.eval()(boundary)


def _missing_from(gradient: Tensor) -> Iterator[str]:
    seen, pending = set(), [gradient.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        if node.name().endswith(("::NotImplemented", "::Error")):
            yield _name_of(node)


def _name_of(node: Any) -> str:
    """The operation behind a node that can only fail: it names it when it is asked to run."""
    try:
        node(*(torch.zeros(()) for _ in node._input_metadata))
    except RuntimeError as error:
        return _operation_in(error)
    return str(node.name())


def _operation_in(error: RuntimeError) -> str:
    found = re.search(r"derivative for (?:aten::|')(\w+)", str(error))
    return f"aten::{found[1]}" if found else "a function marked @once_differentiable"


def _bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())

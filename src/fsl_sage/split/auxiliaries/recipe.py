"""How an auxiliary model is made of the code behind a cut: what is left out, and what is made anew to fit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fsl_sage.split.auxiliaries.blocks import all_but, blocks_of, half, steps
from fsl_sage.split.auxiliaries.rehearsal import SeenCall, Stage
from fsl_sage.split.errors import SplitError
from fsl_sage.split.parts.gates import structure_of
from fsl_sage.split.trace.skeleton import Original, tensor_leaves

ACCEPTED = (
    '"linear", "half", "full", "blocks:N", a share such as "5%", a number of bytes, an nn.Module, or in a run "ridge"'
)
State = Mapping[str, Tensor]
"""Named parameters and buffers."""


@dataclass(frozen=True)
class Recipe:
    """How to make an auxiliary of the server's part."""

    left_out: tuple[SeenCall, ...] = ()
    linears: tuple[tuple[str, int], ...] = ()
    """Linear layers to make anew, with the number of features that arrive."""
    fitted: tuple[str, tuple[int, ...], tuple[int, ...]] | None = None
    """The module in whose place a fitting layer goes, and the shapes that it takes and returns."""

    def leave_out(self, module: nn.Module) -> None:
        """Pass by what is left out, in a module that runs the server's code, and put in the fitting layer."""
        for call in self.left_out:
            inner = module.get_submodule(call.name)
            inner.__dict__["forward"] = _Bypass(call)
        if self.fitted is not None:
            name, took, returned = self.fitted
            like = next(p for key, p in module.named_parameters() if not self.drops(key))
            replaced = module.get_submodule(name)
            bypass, fit_name = replaced.__dict__["forward"], self._fit_name()
            bypass.fit = _Fit(took, returned).to(like.device, like.dtype)
            replaced.add_module(fit_name, bypass.fit)

    def _fit_name(self) -> str:
        """What the fitting layer is called: `fit`, unless the block that it stands for has something of that name."""
        name = "fit"
        while hasattr(self.left_out[-1].module, name):
            name += "_"
        return name

    def make_linears(self, module: nn.Module) -> None:
        """Make the Linear layers anew."""
        for name, arriving in self.linears:
            holder, _, attribute = name.rpartition(".")
            linear = module.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            module.get_submodule(holder)._modules[attribute] = _linear_for(linear, arriving)

    def drops(self, name: str) -> bool:
        """Whether a parameter or buffer belongs to what is left out."""
        return any(name.startswith(f"{call.name}.") for call in self.left_out)

    def state(self, server: State) -> dict[str, Tensor]:
        """What the auxiliary holds, made of what the server does; the tensors made anew are on the meta device."""
        kept = {name: tensor for name, tensor in server.items() if not self.drops(name)}
        if self.fitted is not None:
            name, took, returned = self.fitted
            like = next(tensor for tensor in kept.values() if isinstance(tensor, nn.Parameter))
            shape = _Fit.weight_shape(took, returned)
            kept[f"{name}.{self._fit_name()}.weight"] = nn.Parameter(
                torch.empty(shape, dtype=like.dtype, device="meta")
            )
        for name, arriving in self.linears:
            weight = kept[f"{name}.weight"]
            empty = torch.empty(len(weight), arriving, dtype=weight.dtype, device="meta")
            kept[f"{name}.weight"] = nn.Parameter(empty)
            if (bias := kept.get(f"{name}.bias")) is not None:
                kept[f"{name}.bias"] = nn.Parameter(torch.empty_like(bias, device="meta"))
        return kept


def _linear_for(linear: nn.Linear, arriving: int) -> nn.Linear:
    weight = linear.weight
    return nn.Linear(arriving, linear.out_features, linear.bias is not None, weight.device, weight.dtype)


class Recipes:
    """Finds recipes by rehearsal; what has been tried once is known."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._known: dict[tuple[str, ...], Recipe | SplitError] = {}

    def choose(self, spec: str | int, calls: list[SeenCall], server: State) -> Recipe:
        """The recipe that `spec` asks for, given the calls behind the cut and what the server holds."""
        blocks = blocks_of(calls)
        text = str(spec).strip().lower()
        if re.fullmatch(r"-?\d+", text):
            return self._largest_within(int(text), steps(blocks), server)
        if text in ("linear", "full"):
            return self.without(all_but(blocks, 0 if text == "linear" else len(blocks)))
        if text == "half":
            return self.without(half(blocks))
        if match := re.fullmatch(r"blocks:(\d+)", text):
            if not 0 < int(match[1]) <= len(blocks):
                there = (
                    f"{len(blocks)} blocks"
                    if blocks
                    else "no blocks but its head; give --model.auxiliary linear or full"
                )
                raise SplitError(
                    f"the auxiliary '{spec}' asks for {match[1]} blocks; behind the cut the server has {there}"
                )
            return self.without(all_but(blocks, int(match[1])))
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
            return self._largest_within(int(float(match[1]) / 100 * _bytes(server)), steps(blocks), server)
        raise SplitError(f"the auxiliary '{spec}' is none of {ACCEPTED}")

    def without(self, left_out: Sequence[SeenCall]) -> Recipe:
        """The recipe that leaves these modules out."""
        names = tuple(call.name for call in left_out)
        if names not in self._known:
            try:
                self._known[names] = self._tried(tuple(left_out))
            except SplitError as error:
                self._known[names] = error
        known = self._known[names]
        if isinstance(known, SplitError):
            raise known
        return known

    def _largest_within(self, budget: int, possible: list[list[SeenCall]], server: State) -> Recipe:
        """The recipe with the most units whose state takes at most `budget` bytes."""
        smallest = _bytes(self.without(possible[0]).state(server))
        if smallest > budget:
            raise SplitError(
                f"the smallest auxiliary model, 'linear', takes {smallest:,} bytes; {budget:,} were allowed"
            )
        low, high = 0, len(possible) - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = _bytes(self.without(possible[middle]).state(server)) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return self.without(possible[low])

    def _tried(self, left_out: tuple[SeenCall, ...]) -> Recipe:
        """Try the recipe in which a Linear is made anew, then the one with a fitting layer."""
        if not left_out:
            return Recipe()
        try:
            return self._rehearsed(Recipe(left_out))
        except Exception:
            first, last = left_out[0], left_out[-1]
        try:
            return self._rehearsed(Recipe(left_out, fitted=(last.name, first.took, last.returned)))
        except Exception as error:
            raise SplitError(
                f"no auxiliary model without '{first.name}' can be derived ({error}); pass an nn.Module instead"
            ) from error

    def _rehearsed(self, recipe: Recipe) -> Recipe:
        """The recipe completed by the Linear layers that do not fit what arrives at them."""

        def prepare(copied: nn.Module) -> dict[str, int]:
            recipe.leave_out(copied)
            changed: dict[str, int] = {}
            for name, module in copied.named_modules():
                if type(module) is nn.Linear:
                    module.__dict__["forward"] = _LinearForAnyWidth(module, name, changed)
            return changed

        changed = self._stage.run_copy(prepare)
        return Recipe(recipe.left_out, tuple(changed.items()), recipe.fitted)


class _Bypass:
    """Stands as `forward` of a block that is left out: hands on the tensor that the block works on."""

    def __init__(self, call: SeenCall) -> None:
        self.fit: nn.Module | None = None
        self.structure = call.structure
        self.leaves = call.leaves
        self.main_leaf = call.main_leaf
        self.main_argument = call.main_argument

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensor = tensor_leaves((args, kwargs))[self.main_argument]
        # A copy, for what comes next may change it in place, as it may what the block returns.
        tensor = tensor.clone() if self.fit is None else self.fit(tensor)
        leaves = [tensor if position == self.main_leaf else leaf for position, leaf in enumerate(self.leaves)]
        return pytree.tree_unflatten(leaves, structure_of(self.structure))


class _Fit(nn.Module):
    """One linear map between the widths of two blocks, after a mean over the map or sequence where that gets smaller.

    Maps are [N, C, H, W], sequences [N, L, C].
    """

    def __init__(self, took: tuple[int, ...], returned: tuple[int, ...]) -> None:
        super().__init__()
        extents = zip(self._extent(took), self._extent(returned), strict=True)
        self.kernel = tuple(max(before // after, 1) for before, after in extents)
        self.weight = nn.Parameter(torch.empty(self.weight_shape(took, returned)))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @staticmethod
    def weight_shape(took: tuple[int, ...], returned: tuple[int, ...]) -> tuple[int, int]:
        """The features that it returns and those that it takes."""
        channels = 1 if len(returned) == 4 else -1
        return returned[channels], took[channels]

    @staticmethod
    def _extent(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[2:] if len(shape) == 4 else shape[1:-1]

    def forward(self, x: Tensor) -> Tensor:
        """From [B, C, H, W], [B, L, C] or [B, C] to the width and extent that the next layer takes."""
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


def _bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())

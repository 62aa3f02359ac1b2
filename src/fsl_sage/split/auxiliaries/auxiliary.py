"""Auxiliary models, derived from the server's part.

An auxiliary runs the server's code with some of its blocks left out. What stands behind the last block, the head, is
kept. Where a block that is left out changes the width, the head's Linear is made anew for the width that arrives, and
where no Linear follows, a small layer is put in the block's place that makes up for the difference.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.split.auxiliaries.double_backward import try_double_backward
from fsl_sage.split.auxiliaries.recipe import Recipe, Recipes
from fsl_sage.split.auxiliaries.rehearsal import BehindTheCut, WholeModel, calls_after, seen_calls
from fsl_sage.split.errors import SplitError
from fsl_sage.split.parts.gates import as_boundary
from fsl_sage.split.parts.part import Part, Split, passage, share_registries
from fsl_sage.split.plan.analysis import Analysis
from fsl_sage.split.trace.skeleton import named_tensors, set_tensor, skeleton, tensor_leaves

Spec = str | int | nn.Module


def auxiliary(split: Split, spec: Spec = "blocks:1", *, aligned: bool = True) -> nn.Module:
    """An auxiliary model: takes the boundary, returns what the server returns.

    Args:
        split: A split at one cut.
        spec: "blocks:N", the server's first N blocks and its head; "linear", the head alone; "half", the first half of
            the first block where that has several blocks inside, else of the server's blocks; "full", the server's
            architecture; "5%", the most that fits into this share of the server's bytes; a number of bytes; or a module
            of your own, which is called with the boundary's tensors.
        aligned: Whether it will be aligned, which needs double backward. That is then tried once.

    Returns:
        A module from the boundary, [B, *cut] each, to the server's output. Its weights are copies of the server's; new
        layers have random weights.
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
        try_double_backward(made, split)
    return made


class AuxiliaryStates:
    """What the auxiliary of any cut holds, as shapes: by one rehearsal of the whole model, nothing is built."""

    def __init__(self, analysis: Analysis, spec: str | int) -> None:
        self._analysis = analysis
        self._spec = spec
        stage = WholeModel(analysis)
        self._calls = seen_calls(stage)
        self._recipes = Recipes(stage)
        self._saved: dict[str, Tensor] = analysis.model.state_dict(keep_vars=True)

    def at(self, cut: str) -> dict[str, Tensor]:
        """The state of `auxiliary(split_model(model, cut, …), spec)` by name; only the shapes count."""
        server = self._server(cut)
        return self._recipe(cut, server).state(server)

    def recipe(self, cut: str) -> Recipe:
        """How the auxiliary of a cut is made: of the server's part, or of the whole model, which does the same."""
        return self._recipe(cut, self._server(cut))

    def allows(self, cut: str) -> bool:
        """Whether such an auxiliary can be made behind a cut."""
        try:
            self.recipe(cut)
        except SplitError:
            return False
        return True

    def _server(self, cut: str) -> dict[str, Tensor]:
        parts, _ = self._analysis.parts([cut], tied="untie")
        return {name: self._saved[name] for name in parts["server"] if name in self._saved}

    def _recipe(self, cut: str, server: dict[str, Tensor]) -> Recipe:
        return self._recipes.choose(self._spec, calls_after(self._calls, cut), server)


def _derived(split: Split, spec: str | int) -> Part:
    stage = BehindTheCut(split.server, split.plan.cuts[0], split.example)
    calls = calls_after(seen_calls(stage), split.plan.cuts[0].cut)
    return _built(split.server, Recipes(stage).choose(spec, calls, split.server.state_dict(keep_vars=True)))


def _built(server: Part, recipe: Recipe) -> Part:
    """The auxiliary, with weights of its own where they are trained."""
    part = skeleton(server)
    assert isinstance(part, Part)
    passage(part).drop([name for name in named_tensors(part) if recipe.drops(name)])
    recipe.leave_out(part)
    recipe.make_linears(part)
    own = {id(tensor): _own(tensor) for tensor in named_tensors(part).values()}
    for name, tensor in named_tensors(part).items():
        set_tensor(part, name, own[id(tensor)])
    return part


def _own(tensor: Tensor) -> Tensor:
    """A copy. Frozen parameters are shared, because they never change."""
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        return tensor
    copied = tensor.detach().clone()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


_MODULE = "fsl_sage.module"
"""No attribute of the user's module can have this name."""


class _OwnAuxiliary(nn.Module):
    """A user's module behind the boundary; its state keeps its own names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__[_MODULE] = module
        share_registries(self, module)

    def forward(self, *boundary: Any) -> Any:
        """The module's output for the tensors of a boundary."""
        return self.__dict__[_MODULE](*as_boundary(boundary).tensors)

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode."""
        mode: bool = self.__dict__[_MODULE].training
        return mode

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the flag of the user's module."""
        if _MODULE in self.__dict__:  # else it is being made
            self.__dict__[_MODULE].training = mode


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

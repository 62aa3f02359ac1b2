"""An example's arguments, and variants of them that show which shapes follow the batch and the sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fsl_sage.split.errors import SplitError
from fsl_sage.split.trace.skeleton import call_arguments


@dataclass(frozen=True)
class Inputs:
    """An example's arguments as named leaves."""

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    structure: pytree.TreeSpec
    raw: frozenset[str]
    """The inputs that never cross."""

    @classmethod
    def of(cls, model: nn.Module, example: Any, private: Collection[str] = ()) -> Inputs:
        """The arguments of an example: a tensor, a tuple of arguments, or a dict of keyword arguments.

        Args:
            model: What they are for; its signature gives positional arguments their names.
            example: The arguments.
            private: Further inputs that must never cross.
        """
        args, kwargs = call_arguments(example)
        parameters = list(inspect.signature(model.forward).parameters.values())
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        arguments = [
            *((named[i] if i < len(named) else f"input {i}", arg) for i, arg in enumerate(args)),
            *kwargs.items(),
        ]
        leaves, structure = pytree.tree_flatten((args, kwargs))
        names = [
            f"{name}{pytree.keystr(path)}"
            for name, value in arguments
            for path, _ in pytree.tree_leaves_with_path(value)
        ]
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise SplitError("the example holds no tensor; give a tensor, or a dict of keyword inputs")
        raw = {*_main_inputs(model, arguments, named), *private}
        unknown = raw.difference(name for name, _ in arguments)
        if unknown:
            raise SplitError(f"the private input '{unknown.pop()}' is not in the example; it holds {', '.join(names)}")
        raw_leaves = frozenset(leaf for leaf in names if leaf.split("[")[0].split(".")[0] in raw)
        return cls(tuple(leaves), tuple(names), structure, raw_leaves)

    def main(self) -> Tensor:
        """The first raw tensor: its first dimension is the batch."""
        return next(
            leaf
            for leaf, name in zip(self.leaves, self.names, strict=True)
            if name in self.raw and isinstance(leaf, Tensor)
        )

    @property
    def batch(self) -> int:
        """The number of samples."""
        main = self.main()
        return main.shape[0] if main.dim() else 1

    def few(self) -> Inputs:
        """The first two samples: enough to see what the model does."""
        size = self.batch
        return replace(
            self, leaves=self.changed(lambda leaf: leaf[:2] if leaf.dim() and leaf.shape[0] == size else leaf)
        )

    def arguments(self, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments that have these leaves."""
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def changed(self, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        """The leaves, with `change` applied to every tensor."""
        return tuple(change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)

    def doubled(self) -> tuple[Any, ...]:
        """The same samples twice."""
        size = self.batch
        return self.changed(lambda leaf: torch.cat([leaf, leaf]) if leaf.dim() and leaf.shape[0] == size else leaf)

    def shortened(self) -> tuple[Any, ...] | None:
        """Sequences without their last element; None where the main input is no sequence."""
        main = self.main()
        sequence = main.dim() == 3 or (main.dim() == 2 and not main.is_floating_point())
        if not sequence or main.shape[1] < 2:
            return None
        length = main.shape[1]

        def shorten(leaf: Tensor) -> Tensor:
            for dimension in range(1, leaf.dim()):
                if leaf.shape[dimension] == length:
                    leaf = leaf.narrow(dimension, 0, length - 1)
            return leaf

        return self.changed(shorten)


def _main_inputs(model: nn.Module, arguments: Sequence[tuple[str, Any]], signature: list[str]) -> set[str]:
    """The raw data among the arguments: what the model calls its main input, or its first one."""
    given = [name for name, value in arguments if isinstance(value, Tensor)]
    declared = getattr(model, "main_input_name", None)
    if declared in given:
        return {declared}
    if isinstance(declared, str) and "input_ids" in given:  # Perceiver takes a text under two names
        return {"input_ids"}
    if isinstance(declared, str) and (floating := [n for n, v in arguments if n in given and v.is_floating_point()]):
        return set(floating)
    in_order = [name for name in signature if name in given] or given
    return set(in_order[:1]) or {arguments[0][0]}

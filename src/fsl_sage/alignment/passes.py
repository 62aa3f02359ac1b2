"""Passes through a part that stands behind the cut: the server part or an auxiliary."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsl_sage.models.conv import gradients_of_inputs
from fsl_sage.models.norm import batch_statistics, in_training
from fsl_sage.problems.base import Task
from fsl_sage.split import Ridge, detached_leaves, fitted_scale

Smash = tuple[Tensor, ...]
"""The boundary tensors z_f of a cut, [B, *cut] each; the cut gradients z_b have the same form."""


@dataclass(frozen=True)
class Passes:
    """The loss behind the cut and its gradient with respect to the smashed data."""

    task: Task
    device: torch.device
    precision: str = "float32"

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of forward passes."""
        if self.precision != "bf16":
            return nullcontext()
        # Shapes without data are made by code that takes them to be on the CPU.
        return torch.autocast("cpu" if self.device.type == "meta" else self.device.type, dtype=torch.bfloat16)

    def learn(
        self, part: nn.Module, z: Sequence[Tensor], target: Mapping[str, Tensor], *, cut_gradient: bool = True
    ) -> tuple[Smash, Tensor]:
        """Training mode: the part's own weights get gradients. Returns (z_b, empty unless asked for; the loss)."""
        inputs = detached_leaves(z) if cut_gradient else tuple(z)
        with self.autocast():
            loss = self.task.loss_once(self.task.output(in_training(part), inputs, target), target)
        loss.backward()  # type: ignore[no-untyped-call]
        return scaled(part, gradients_of(inputs)), loss.detach()

    def cut_gradient(
        self, part: nn.Module, z: Sequence[Tensor], target: Mapping[str, Tensor], *, create_graph: bool = False
    ) -> tuple[Smash, Tensor | None]:
        """z_b and the loss, the part unchanged: batch statistics, running ones untouched, dropout off.

        Only alignment needs the graph of the gradient (`create_graph`) to differentiate it once more; it gets the
        gradient as it is, without an auxiliary's fitted scale. A ridge auxiliary has no loss.
        """
        if isinstance(part, Ridge):
            estimated = part.estimate(z, target) / self.task.terms(target)
            floating = [place for place, tensor in enumerate(z) if tensor.is_floating_point()]
            return tuple(estimated if place == part.place else torch.zeros_like(z[place]) for place in floating), None
        inputs = detached_leaves(z)
        loss_of = self.task.loss if create_graph else self.task.loss_once
        with batch_statistics(part):
            with self.autocast():
                loss = loss_of(self.task.output(part, inputs, target), target)
            wanted = [leaf for leaf in inputs if leaf.requires_grad]
            with gradients_of_inputs():
                gradients = torch.autograd.grad(
                    loss, wanted, create_graph=create_graph, allow_unused=True, materialize_grads=True
                )
        return gradients if create_graph else scaled(part, gradients), loss.detach()


def gradients_of(inputs: Sequence[Tensor]) -> Smash:
    """The gradients of leaves; zero where a part, such as a small auxiliary, has not used what crossed."""
    wanted = (leaf for leaf in inputs if leaf.is_leaf and leaf.requires_grad)
    return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in wanted)


def scaled(part: nn.Module, gradients: Smash) -> Smash:
    """Cut gradients through a part; through an auxiliary that was aligned by direction, times its fitted scale."""
    scale = fitted_scale(part)
    return gradients if scale is None else tuple(gradient * scale for gradient in gradients)

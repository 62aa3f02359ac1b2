"""Gradients through a part behind the cut."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsl_sage.alignment.passes import Passes


class UsesTheFirst(nn.Linear):
    """An auxiliary that leaves out what the second tensor is for."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(first)


class Task:
    def output(self, part: nn.Module, z: tuple[Tensor, ...], target: Mapping[str, Tensor]) -> Any:
        return part(*z)

    def loss(self, output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        return output.square().mean()

    loss_once = loss


@pytest.mark.parametrize("way", ["learn", "cut_gradient"])
def test_what_a_part_does_not_use_has_a_gradient_of_zero_in_its_place(way: str) -> None:
    passes: Any = Passes(Task(), torch.device("cpu"))  # type: ignore[arg-type]
    z = (torch.randn(3, 4), torch.randn(3, 5))
    gradients, _ = getattr(passes, way)(UsesTheFirst(4, 2), z, {})
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in z]
    assert gradients[0].abs().sum() > 0
    assert not gradients[1].any()

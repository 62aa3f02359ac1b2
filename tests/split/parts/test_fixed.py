"""A part that is built on the meta device, with the tensors of its own, computes what the same part of a model does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsl_sage.split import Analysis, Split, SplitError, fixed_tensors, set_fixed
from fsl_sage.split.trace.skeleton import built_on_meta, named_tensors, set_tensor, tensor_leaves
from tests.split.families import FAMILIES

MANY_LAYERS = {"resnet18", "mobilenet_v2", "efficientnet"}


def call(part: Any, example: Any) -> Any:
    return part(**example) if isinstance(example, dict) else part(example)


def middle_cut(analysis: Analysis) -> str:
    return analysis.cut_names[len(analysis.cut_names) // 2]


def rebuilt(make: Any, split: Split) -> list[nn.Module]:
    """The parts of a split, built anew without weights, then given what travels and what is fixed."""
    parts = Split(built_on_meta(make), split.plan).parts
    for part, original in zip(parts, split.parts, strict=True):
        wanted, fixed = named_tensors(original), fixed_tensors(original)
        for name, tensor in named_tensors(part).items():
            assert tensor.is_meta
            if name not in fixed:
                new = wanted[name].detach().clone()
                set_tensor(part, name, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)
        set_fixed(part, fixed)
    return list(parts)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in MANY_LAYERS])
def test_parts_built_without_the_model_compute_its_bits(family: str) -> None:
    torch.manual_seed(0)
    model, example = FAMILIES[family]()
    if "lora" in family:
        named = dict(model.named_parameters())
        assert any(not weight.requires_grad for weight in named.values())
    analysis = Analysis(model.eval(), example)
    split = Split(model, analysis.plan([middle_cut(analysis)], tied="untie"))
    client, server = rebuilt(lambda: FAMILIES[family]()[0].eval(), split)
    with torch.no_grad():
        boundary = call(client, example)
        for mine, its in zip(boundary.tensors, call(split.client, example).tensors, strict=True):
            assert torch.equal(mine, its)
        outputs = [tensor_leaves(part(boundary)) for part in (server, split.server)]
    assert all(torch.equal(mine, its) for mine, its in zip(*outputs, strict=True))


class Computes(nn.Module):
    """Its constructor looks at values; it keeps tensors as plain attributes, alone and in a list."""

    def __init__(self) -> None:
        super().__init__()
        rates = [float(rate) for rate in torch.linspace(0, 0.5, 3)]
        self.scale = torch.tensor([2.0, 3.0])
        self.shifts = [torch.full((2,), rate) for rate in rates]
        self.first = nn.Linear(2, 2)
        self.register_buffer("frequencies", torch.arange(2.0) + 1, persistent=False)
        self.second = nn.Sequential(nn.Linear(2, 2 if sum(rates) > 0.1 else 3), nn.ReLU())
        self.head = nn.Linear(2, 2)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.scale) * self.frequencies
        return self.head(self.second(x) + self.shifts[2])


def test_a_constructor_that_looks_at_values_and_tensors_that_no_state_has() -> None:
    torch.manual_seed(0)
    model, x = Computes(), torch.randn(4, 2)
    split = Split(model, Analysis(model, x).plan(["first"], tied="refuse"))
    assert set(fixed_tensors(split.server)) >= {"head.weight", "head.bias", "frequencies", "shifts[2]"}
    assert "first.weight" not in fixed_tensors(split.server), "what stands for another part's weight is none of its own"
    client, server = rebuilt(Computes, split)
    assert torch.equal(server(client(x)), model(x))
    assert not any(weight.is_meta for weight in (*client.parameters(), *server.parameters()))


def test_what_does_not_fit_is_refused() -> None:
    model, x = Computes(), torch.randn(4, 2)
    split = Split(model, Analysis(model, x).plan(["first"], tied="refuse"))
    fixed = fixed_tensors(split.server)
    with pytest.raises(SplitError, match="'frequencies' is missing"):
        set_fixed(split.server, {name: tensor for name, tensor in fixed.items() if name != "frequencies"})
    with pytest.raises(SplitError, match=r"'head.bias' has the shape \(2,\); one of \(3,\) came"):
        set_fixed(split.server, {**fixed, "head.bias": torch.zeros(3)})

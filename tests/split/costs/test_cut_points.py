"""The table of cuts: exact sizes, FLOPs as torch counts them, and memory that can be counted by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fsl_sage.models import ResNet18
from fsl_sage.models.conv import Conv2d
from fsl_sage.split import CutPoint, cut_points, split_model
from fsl_sage.split.trace.skeleton import on_meta, skeleton
from tests.split.families import FAMILIES


def rows_of(model: nn.Module, example: object) -> dict[str, CutPoint]:
    return {row.name: row for row in cut_points(model, example)}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def resnet() -> dict[str, CutPoint]:
    return rows_of(ResNet18(10), torch.randn(3, 3, 32, 32))


def test_resnet18_at_layer2_has_the_papers_sizes(resnet: dict[str, CutPoint]) -> None:
    row = resnet["layer2"]
    assert (row.client_parameters, row.client_bytes) == (683_072, 2_740_048)
    assert (row.server_parameters, row.server_bytes) == (10_498_570, 42_025_080)
    assert row.activation_bytes == 8_192
    assert [tensor.shape for tensor in row.tensors] == [(3, 128, 4, 4)]
    assert row.tensors[0].batched


def test_rows_come_in_the_order_of_the_forward_pass(resnet: dict[str, CutPoint]) -> None:
    parameters = [row.client_parameters for row in resnet.values()]
    assert parameters == sorted(parameters)
    assert {"conv1", "layer1", "layer2.0.conv1", "layer2", "layer4", "avgpool"} <= resnet.keys()
    assert {"layer1.0.relu", "layer1.1", "fc"}.isdisjoint(resnet)  # repeated, ends with layer1, is the head
    assert len(resnet["layer2.0.conv1"].tensors) == 2


def count(function: object) -> int:
    with FlopCounterMode(display=False) as counter:
        function()  # type: ignore[operator]
    return counter.get_total_flops()


@pytest.mark.parametrize("cut", ["layer1", "layer2.0.conv1", "layer3"])
def test_flops_are_those_that_torch_counts_in_the_parts(
    resnet: dict[str, CutPoint], cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way the package's own convolutions compute: torch counts plain ones."""
    monkeypatch.setattr(Conv2d, "_pays", lambda self, x: False)
    x = torch.randn(3, 3, 32, 32)
    model = ResNet18(10)
    split = split_model(model, cut, x)

    def client_step() -> None:
        tensors = split.client(x).tensors
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])

    assert resnet[cut].client_flops == count(client_step)
    assert resnet[cut].client_flops + resnet[cut].server_flops == count(lambda: model(x).sum().backward())


def test_memory_counted_by_hand() -> None:
    """Two Linear layers without bias, batch 10, float32: 5 -> 7 -> 3, cut after the ReLU between them."""
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 3, bias=False))
    row = rows_of(model, torch.randn(10, 5))["1"]
    weights, batch = 7 * 5 * 4, 10 * 5 * 4
    hidden = 10 * 7 * 4
    # At the peak, in the backward pass: the ReLU's saved output, the gradient that comes in and the one that it makes.
    # The loss and its own gradient are two numbers more.
    assert row.client_memory == weights + 2 * weights + batch + 3 * hidden + 2 * 4
    assert row.client_trainable_bytes == weights
    assert row.activation_bytes == 7 * 4


def test_frozen_parameters_need_neither_gradients_nor_moments() -> None:
    model = nn.Sequential(nn.Linear(5, 70), nn.ReLU(), nn.Linear(70, 70), nn.ReLU(), nn.Linear(70, 3))
    x = torch.randn(2, 5)
    trained = rows_of(model, x)["3"]
    model[2].requires_grad_(False)
    frozen = rows_of(model, x)["3"]
    saved = trained.client_memory - frozen.client_memory
    assert trained.client_trainable_bytes - frozen.client_trainable_bytes == 4 * (70 * 70 + 70)
    assert saved >= 3 * 4 * (70 * 70 + 70)
    assert frozen.client_bytes == trained.client_bytes


@pytest.mark.parametrize("family", ["vit", "gpt2", "llama_lora", "regnet"])
def test_a_model_on_the_meta_device_has_the_same_table(family: str) -> None:
    torch.manual_seed(0)
    model, example = FAMILIES[family]()
    assert isinstance(example, dict)
    example.pop("attention_mask", None)  # looked at by value, which the meta device has none of
    real = cut_points(model, example)
    empty = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in example.items()}
    meta = cut_points(skeleton(model, on_meta), empty)
    assert [row.name for row in real] == [row.name for row in meta]
    for one, other in zip(real, meta, strict=True):
        assert (one.client_bytes, one.server_parameters, one.untied) == (
            other.client_bytes,
            other.server_parameters,
            other.untied,
        )
        assert one.tensors == other.tensors
        assert (one.client_flops, one.server_flops) == (other.client_flops, other.server_flops)
        assert one.client_memory == pytest.approx(other.client_memory, rel=0.05)


def test_tied_weights_count_on_both_sides() -> None:
    model, example = FAMILIES["gpt2"]()
    rows = cut_points(model, example)
    tied = model.transformer.wte.weight.numel()
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert all(row.client_parameters + row.server_parameters == whole + tied for row in rows if row.untied)
    assert any(row.untied == ("lm_head.weight",) for row in rows)


def test_every_row_can_be_split() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.ReLU()), nn.Linear(7, 3))
    x = torch.randn(2, 5)
    rows = cut_points(model, x)
    assert [row.name for row in rows] == ["0", "1.0", "1"]
    assert all(torch.equal(split_model(model, row.name, x)(x), model(x)) for row in rows)


def test_planning_changes_nothing() -> None:
    model = ResNet18(10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example = torch.randn(2, 3, 32, 32)
    random = torch.get_rng_state()
    cut_points(model, example)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training

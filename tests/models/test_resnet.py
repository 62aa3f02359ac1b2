import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsl_sage.models import DEFAULT_CUT, MODELS, ResNet18

CLIENT = ("conv1", "bn1", "maxpool", "relu", "layer1", "layer2")
SERVER = ("layer3", "layer4", "avgpool", "fc")


def part(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    return nn.ModuleDict({name: child for name, child in model.named_children() if name in names})


def sizes(model: nn.Module) -> tuple[int, int, int]:
    """Parameters, parameters and buffers, bytes of the state_dict."""
    tensors = model.state_dict().values()
    return (
        sum(p.numel() for p in model.parameters()),
        sum(tensor.numel() for tensor in tensors),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )


def test_sizes_of_the_parts() -> None:
    model = ResNet18()
    assert sizes(part(model, CLIENT)) == (683_072, 685_002, 2_740_048)
    parameters, _, size = sizes(part(model, SERVER))
    assert round(parameters / 1e6, 2) == 10.50
    assert size == 42_025_080
    auxiliary = nn.ModuleDict({"layer3": model.layer3, "avgpool": model.avgpool, "fc": nn.Linear(256, 10)})
    assert sizes(auxiliary) == (2_102_282, 2_104_847, 8_419_408)


def test_the_cut_activation_is_8192_bytes_a_sample() -> None:
    x = torch.randn(2, 3, 32, 32)
    for name, child in ResNet18().named_children():
        x = child(x)
        if name == DEFAULT_CUT["resnet18"]:
            break
    assert x.shape == (2, 128, 4, 4)
    assert x[0].numel() * x.element_size() == 8_192


def test_state_dict_has_the_usual_names_and_shapes() -> None:
    """The whole list, written down from the architecture."""

    def norm(name: str, channels: int) -> dict[str, tuple[int, ...]]:
        vectors = ("weight", "bias", "running_mean", "running_var")
        return {**{f"{name}.{v}": (channels,) for v in vectors}, f"{name}.num_batches_tracked": ()}

    expected = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    channels_in = 64
    for stage, channels in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            name = f"layer{stage}.{block}"
            expected |= {f"{name}.conv1.weight": (channels, channels_in, 3, 3), **norm(f"{name}.bn1", channels)}
            expected |= {f"{name}.conv2.weight": (channels, channels, 3, 3), **norm(f"{name}.bn2", channels)}
            if channels_in != channels:
                expected |= {f"{name}.downsample.0.weight": (channels, channels_in, 1, 1)}
                expected |= norm(f"{name}.downsample.1", channels)
            channels_in = channels
    expected |= {"fc.weight": (10, 512), "fc.bias": (10,)}
    for model in (ResNet18(), ResNet18(fast=False)):
        assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected
        assert all(tensor.is_contiguous() for tensor in model.state_dict().values())


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = ResNet18()
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05), name
            assert abs(module.weight.mean().item()) < 0.05 * math.sqrt(2 / fan_out), name
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def reference(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """ResNet-18 in evaluation mode, by the book: functions and names only."""

    def norm(x: Tensor, name: str) -> Tensor:
        values = (weights[f"{name}.{v}"] for v in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *values)

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    x = F.max_pool2d(F.relu(norm(conv(x, "conv1", 2), "bn1")), 3, 2, 1)
    for stage in range(1, 5):
        for block in range(2):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = F.relu(norm(conv(x, f"{name}.conv1", stride), f"{name}.bn1"))
            y = norm(conv(y, f"{name}.conv2"), f"{name}.bn2")
            if stride == 2:
                x = norm(conv(x, f"{name}.downsample.0", 2), f"{name}.downsample.1")
            x = F.relu(y + x)
    return F.linear(x.mean((2, 3)), weights["fc.weight"], weights["fc.bias"])


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("size", [32, 64, 40])
def test_evaluation_by_the_book(fast: bool, size: int) -> None:
    torch.manual_seed(0)
    model = ResNet18(classes=7, fast=fast).double()
    model(torch.randn(8, 3, size, size, dtype=torch.float64))  # gives the running statistics values of their own
    model.eval()
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    torch.testing.assert_close(model(x), reference(model.state_dict(), x), rtol=1e-9, atol=1e-9)


def test_pooling_before_the_relu_changes_nothing() -> None:
    torch.manual_seed(0)
    model = ResNet18(fast=False)
    x = torch.randn(4, 64, 16, 16)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, usual = model.relu(model.maxpool(a)), model.maxpool(model.relu(b))
    assert torch.equal(ours, usual)
    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (usual * weights).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad, b.grad)


def test_the_same_step_as_with_the_plain_layers() -> None:
    torch.manual_seed(0)
    fast, plain = ResNet18(), ResNet18(fast=False)
    plain.load_state_dict(fast.state_dict())
    x, target = torch.randn(64, 3, 32, 32), torch.arange(64) % 10
    loss_fast, loss_plain = (F.cross_entropy(model(x), target).item() for model in (fast, plain))
    assert loss_fast == pytest.approx(loss_plain, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("classes", "channels", "size"), [(10, 3, 32), (100, 1, 28), (3, 4, 8)])
def test_every_model_takes_classes_and_channels(name: str, classes: int, channels: int, size: int) -> None:
    model = MODELS[name](classes, channels)
    assert model(torch.randn(3, channels, size, size)).shape == (3, classes)
    assert DEFAULT_CUT[name] in dict(model.named_children())

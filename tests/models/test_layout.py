"""A cut changes no bit, wherever it is and however the tensors that cross it are stored."""

import copy
from collections.abc import Callable, Collection

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsl_sage.models import ResNet18, SmallCNN, replace_batch_norm
from fsl_sage.models.layout import AdaptiveAvgPool2d, MaxPool2d, channels_last, in_channels_last
from fsl_sage.models.norm import BatchNorm2d, GroupNorm

Stages = list[tuple[str, nn.Module]]


def stages(model: nn.Module) -> Stages:
    """The model as a chain: what its sequential parts hold, one by one."""
    chain: Stages = []
    for name, child in model.named_children():
        inner = child.named_children() if isinstance(child, nn.Sequential) else ()
        chain += [(f"{name}.{n}", c) for n, c in inner] or [(name, child)]
    return chain


def run(chain: Stages, x: Tensor) -> Tensor:
    for _, stage in chain:
        x = stage(x.flatten(1) if isinstance(stage, nn.Linear) else x)
    return x


def plain(x: Tensor) -> Tensor:
    """What arrives on the other side of a wire: the same values in plain order, nothing of the graph."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def odd(x: Tensor) -> Tensor:
    """The same values in an order that no layer would choose."""
    return x.detach().permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def step_whole(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    logits = model(x)
    F.cross_entropy(logits, target).backward()
    return logits


def step_cut(model: nn.Module, cut: int, x: Tensor, target: Tensor, cross: Callable[[Tensor], Tensor]) -> Tensor:
    chain = stages(model)
    smashed = run(chain[:cut], x)
    received = cross(smashed).requires_grad_()
    logits = run(chain[cut:], received)
    F.cross_entropy(logits, target).backward()
    assert received.grad is not None
    smashed.backward(cross(received.grad))
    return logits


def bits(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients, **dict(model.named_buffers())}


def check_cuts(model: nn.Module, images: int, cross: Callable[[Tensor], Tensor], cuts: Collection[str] = ()) -> None:
    """Compare the whole model with its halves, cut after each of the named stages, or after every one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, 3, 32, 32, generator=generator)
    target = torch.randint(10, (images,), generator=generator)
    whole = copy.deepcopy(model).train()
    expected = bits(whole, step_whole(whole, x, target))
    names = [name for name, _ in stages(model)]
    for cut in cuts or names[:-1]:
        halves = copy.deepcopy(model).train()
        found = bits(halves, step_cut(halves, names.index(cut) + 1, x, target, cross))
        assert found.keys() == expected.keys()
        wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not wrong, f"cut after {cut}: {wrong}"


def maps(model: nn.Module) -> list[str]:
    """The stages after which one of this package's layers comes; `nn.Linear` takes plain tensors only."""
    names = [name for name, _ in stages(model)]
    return names[: next(i for i, name in enumerate(names) if name.endswith("avgpool"))]


def test_resnet_cut_anywhere_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    check_cuts(ResNet18(), 3, plain)


def test_resnet_takes_tensors_in_any_order() -> None:
    torch.manual_seed(0)
    model = ResNet18()
    check_cuts(model, 3, odd, maps(model))


@pytest.mark.parametrize("cross", [plain, odd])
def test_resnet_cut_gives_the_same_bits_with_many_images(cross: Callable[[Tensor], Tensor]) -> None:
    """From 64 images on, more of the convolutions are matrix products."""
    torch.manual_seed(0)
    check_cuts(ResNet18(), 64, cross, ["relu", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0"])


@pytest.mark.parametrize("change", [lambda model: model, replace_batch_norm])
def test_small_cnn_cut_anywhere_gives_the_same_bits(change: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = change(SmallCNN())
    check_cuts(model, 16, plain)
    check_cuts(model, 16, odd, maps(model))


def test_the_plain_layers_do_not_keep_this_law() -> None:
    """Otherwise the tests above would prove nothing."""
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="cut after"):
        check_cuts(ResNet18(fast=False), 3, lambda x: channels_last(x.detach()).clone(), ["layer2.1"])


LAYERS = [MaxPool2d(2), AdaptiveAvgPool2d((2, 2)), BatchNorm2d(6), GroupNorm(2, 6)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_layers_are_their_namesakes(layer: nn.Module) -> None:
    layer = copy.deepcopy(layer).double()
    namesake = type(layer).__mro__[1]
    x, y = (torch.randn(5, 6, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for _ in "xy")
    x.requires_grad_()
    y.requires_grad_()
    ours, theirs = layer(x), namesake.forward(layer, y)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)


def test_channels_last_settles_the_strides() -> None:
    for x in (torch.randn(4, 6, 3, 3), torch.randn(4, 6, 1, 1)):
        kinds = [
            plain(x),
            odd(x),
            x.contiguous(memory_format=torch.channels_last),
            x.permute(2, 3, 0, 1).clone().permute(2, 3, 0, 1),
        ]
        assert len({channels_last(kind).stride() for kind in kinds}) == 1
        assert all(torch.equal(channels_last(kind), x) for kind in kinds)


def test_other_devices_are_left_alone() -> None:
    x = torch.empty(4, 6, 3, 3, device="meta")
    assert in_channels_last(lambda x: x, x) is x

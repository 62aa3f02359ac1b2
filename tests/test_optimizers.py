"""Fused optimizers read memory linearly: what reaches them must lie in memory as the weights do."""

import pytest
import torch
from torch import nn

from fsl_sage.optimizers import LayoutError, has_layout_of, in_layout_of, make_optimizer

NAMES = ("adam", "adamw", "sgd")


def weight(*, channels_last=False):
    torch.manual_seed(0)
    values = torch.randn(4, 3, 5, 2)
    return nn.Parameter(values.to(memory_format=torch.channels_last) if channels_last else values)


def scrambled(tensor):
    """Equal values, other strides."""
    return tensor.detach().permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2)


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_with_its_options(name):
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    optimizer = make_optimizer(name, [weight()], lr=0.5, weight_decay=0.25, momentum=0.75)
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["fused"]) == (0.5, 0.25, True)
    assert name != "sgd" or group["momentum"] == 0.75


def test_torchs_fused_kernels_do_scramble_such_gradients():
    """The reason for all of this: should torch mend it one day, the check may go."""
    steps = {}
    for fused in (True, False):
        parameter = weight()
        parameter.grad = scrambled(torch.arange(120.0).reshape(4, 3, 5, 2))
        torch.optim.SGD([parameter], lr=1.0, fused=fused).step()
        steps[fused] = parameter.detach()
    assert not torch.allclose(steps[True], steps[False])


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_in_another_layout_is_refused(name):
    parameter = weight()
    optimizer = make_optimizer(name, [parameter], lr=0.1, weight_decay=0.0)
    parameter.grad = scrambled(torch.randn_like(parameter))
    with pytest.raises(LayoutError, match="gradient of a weight"):
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_a_state_in_another_layout_is_refused(name):
    parameter = weight()
    optimizer = make_optimizer(name, [parameter], lr=0.1, weight_decay=0.0, momentum=0.9)
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    entry = "momentum_buffer" if name == "sgd" else "exp_avg_sq"
    optimizer.state[parameter][entry] = scrambled(optimizer.state[parameter][entry])
    with pytest.raises(LayoutError, match=f"optimizer state '{entry}'"):
        optimizer.step()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_backward_gives_is_taken(name, channels_last):
    parameter = weight(channels_last=channels_last)
    optimizer = make_optimizer(name, [parameter], lr=0.1, weight_decay=0.0)
    for _ in range(2):
        (parameter.permute(3, 1, 0, 2) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_strides_along_a_dimension_of_one_mean_nothing():
    flat = torch.randn(6, 3, 1, 1)
    other = flat.as_strided(flat.shape, (3, 1, 7, 11))
    assert has_layout_of(flat, other)
    assert in_layout_of(flat, other) is other


def test_a_tensor_is_brought_into_the_layout_of_its_weight():
    for like in (weight(), weight(channels_last=True)):
        moved = in_layout_of(like, scrambled(like))
        assert moved.stride() == like.stride()
        assert torch.equal(moved, like)
    assert in_layout_of(like, moved) is moved


def test_a_weight_whose_first_gradient_comes_later():
    """A layer that the first clients of a round do not reach: torch's fused momentum is for all weights or for none."""
    weights = [[nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2)]
    ours = make_optimizer("sgd", weights[0], lr=0.1, weight_decay=0.01, momentum=0.9)
    theirs = torch.optim.SGD(weights[1], lr=0.1, weight_decay=0.01, momentum=0.9)
    for step in range(4):
        for optimizer, own in ((ours, weights[0]), (theirs, weights[1])):
            for weight in own[: 1 if step == 0 else 2]:
                weight.grad = torch.full((3,), 1.0 + step)
            optimizer.step()
    for found, expected in zip(*weights, strict=True):
        torch.testing.assert_close(found, expected)

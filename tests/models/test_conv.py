"""The convolution gives `nn.Conv2d`'s numbers: outputs, gradients and gradients of gradients."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsl_sage.models import Conv2d, ResNet18
from fsl_sage.models.conv import _dense, _tables, gradients_of_inputs

# images, channels in and out, map, kernel, stride: everything in ResNet-18 that becomes matrix products, in small
SMALL = [
    (2, 6, 6, 1, 3, 1),
    (2, 6, 10, 2, 3, 1),
    (2, 32, 10, 4, 3, 1),
    (64, 64, 4, 8, 3, 1),
    (2, 6, 10, 2, 3, 2),
    (64, 3, 4, 4, 3, 2),
    (3, 6, 10, 4, 1, 2),
    (3, 6, 10, 3, 1, 2),
    (1, 6, 10, 2, 1, 2),
    (1, 6, 10, 2, 3, 1),
]
RESNET = [
    (64, 64, 64, 8, 3, 1),
    (32, 128, 128, 4, 3, 1),
    (32, 256, 256, 2, 3, 1),
    (32, 512, 512, 1, 3, 1),
    (64, 128, 256, 4, 3, 2),
    (32, 256, 512, 2, 3, 2),
    (32, 128, 256, 4, 1, 2),
]
Case = tuple[int, int, int, int, int, int]


def pair(case: Case, dtype: torch.dtype, bias: bool = False) -> tuple[Conv2d, nn.Conv2d, Tensor]:
    images, channels_in, channels, size, kernel, stride = case
    torch.manual_seed(0)
    ours = Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=bias, dtype=dtype)
    theirs = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=bias, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, torch.randn(images, channels_in, size, size, dtype=dtype)


def gradients(conv: nn.Conv2d, x: Tensor) -> list[Tensor]:
    """The output, its gradients, and the gradients of a number made of these gradients."""
    x = x.clone().requires_grad_()
    inputs = [x, *conv.parameters()]
    y = conv(x)
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    first = torch.autograd.grad((y * weights).sum() + y.square().mean(), inputs, create_graph=True)
    second = torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), inputs)
    return [y, *first, *second]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_double_precision(case: Case, bias: bool) -> None:
    ours, theirs, x = pair(case, torch.float64, bias)
    for found, expected in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        assert relative(found, expected) < 1e-12


@pytest.mark.parametrize("case", RESNET, ids=str)
def test_single_precision_at_the_real_sizes(case: Case) -> None:
    ours, theirs, x = pair(case, torch.float32)
    for found, expected in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("case", [*SMALL, *RESNET], ids=str)
def test_small_maps_use_no_convolution(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    ours, _, x = pair(case, torch.float32)
    monkeypatch.setattr(F, "conv2d", refuse)
    ours(x)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"kernel_size": 3, "padding": 1}, 3),
        ({"kernel_size": 3, "padding": 1}, 8),
        ({"kernel_size": 3, "padding": 1}, 16),
        ({"kernel_size": 3, "padding": 1, "stride": (1, 2)}, 4),
        ({"kernel_size": 3, "padding": 1, "stride": 3}, 4),
        ({"kernel_size": 3, "padding": 1, "groups": 2}, 4),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, 4),
        ({"kernel_size": 3, "padding": 1, "dilation": 2}, 4),
        ({"kernel_size": 3, "padding": "same"}, 4),
        ({"kernel_size": 3}, 4),
        ({"kernel_size": 5, "padding": 2}, 4),
        ({"kernel_size": 1, "stride": 2, "padding": 1}, 4),
        ({"kernel_size": 1}, 4),
    ],
    ids=str,
)
def test_everything_else_is_the_plain_operation(options: dict[str, Any], size: int) -> None:
    ours, theirs = Conv2d(32, 6, **options), nn.Conv2d(32, 6, **options)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 32, size, size).contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours(x), theirs(x))


def test_maps_that_are_not_square_single_images_and_none() -> None:
    ours, theirs, _ = pair((2, 32, 10, 4, 3, 1), torch.float64)
    for shape in ((2, 32, 4, 8), (2, 32, 1, 2), (32, 4, 4), (0, 32, 4, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_gradients_of_gradients_by_finite_differences() -> None:
    for case in SMALL[:3] + SMALL[4:5]:
        conv = pair(case, torch.float64)[0]
        x = torch.randn(1, conv.in_channels, case[3], case[3], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(conv, x, fast_mode=True)


def test_the_one_product_of_two_by_two_pixels() -> None:
    """What bfloat16 takes there is exact, so double precision shows every mistake."""

    class Dense(Conv2d):
        def _small(self, x: Tensor) -> Tensor:
            return _dense(x, self.weight)

    ours, theirs, x = pair((3, 6, 10, 2, 3, 1), torch.float64)
    ours.__class__ = Dense
    for found, expected in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        assert relative(found, expected) < 1e-12


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", [*SMALL, *RESNET], ids=str)
def test_bfloat16_loses_no_more_than_its_own_digits(case: Case, bias: bool) -> None:
    """Outputs and gradients by bfloat16 factors, against those of the same factors in double precision."""
    ours, theirs, x = pair(case, torch.float32, bias)
    x = x.relu().bfloat16()
    given = torch.Generator().manual_seed(2)
    found, expected = [], []
    for conv, dtype, results in ((ours, torch.float32, found), (theirs, torch.float64, expected)):
        conv.to(dtype).weight.data = conv.weight.data.bfloat16().to(dtype)
        z = (x if conv is ours else x.double()).clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=conv is ours):
            y = conv(z)
        g = torch.randn(y.shape, generator=given.manual_seed(2)).bfloat16()
        y.backward(g.to(y.dtype))
        results += [y.detach(), z.grad, *(weight.grad for weight in conv.parameters())]
    assert found[0].dtype == torch.bfloat16
    assert [each.dtype for each in found[2:]] == [torch.float32] * (1 + bias)
    for one, other in zip(found, expected, strict=True):
        assert relative(one.double(), other) < 2**-7  # rounded to 8 bits, twice where a sum is in parts


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding"),
    [((1, 1), 3, 2, 1), ((2, 1), 3, 2, 1), ((1, 1), 3, 3, 1), ((2, 2), 5, 2, 2), ((2, 2), 7, 2, 3)],
)
def test_taps_that_meet_no_pixel_have_no_gradient_in_bfloat16(
    shape: tuple[int, int], kernel: int, stride: int, padding: int
) -> None:
    """torch's own kernel for these shapes leaves them unset."""
    conv = Conv2d(8, 8, kernel, stride, padding, bias=False)
    plain = nn.Conv2d(8, 8, kernel, stride, padding, bias=False).double()
    plain.weight.data = conv.weight.data.double()
    x = torch.randn(4, 8, *shape)
    plain(x.double()).sum().backward()
    for _ in range(20):
        torch.full((2**16,), 7e30)  # what unset memory would show
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = conv(x)
        assert y.dtype == torch.bfloat16
        conv.weight.grad = None
        y.float().sum().backward()
        assert relative(conv.weight.grad.double(), plain.weight.grad) < 2**-7


def test_no_winograd_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("fsl_sage.models.conv._by_products", refuse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for case in (*SMALL, *RESNET):
            ours, _, x = pair(case, torch.float32)
            ours(x)


def test_larger_maps_in_bfloat16_and_half_precision_are_the_plain_operation() -> None:
    ours, theirs, x = pair((2, 32, 16, 4, 3, 1), torch.float32)
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
        assert torch.equal(ours(x), theirs(x))
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.bfloat16()(x.bfloat16()), theirs.bfloat16()(x.bfloat16()))


def test_other_devices_use_the_plain_operation() -> None:
    assert Conv2d(32, 10, 3, padding=1, device="meta")(torch.empty(2, 32, 4, 4, device="meta")).shape == (2, 10, 4, 4)


def test_only_the_gradients_asked_for() -> None:
    ours, theirs, x = pair((2, 32, 10, 4, 3, 1), torch.float64)
    x.requires_grad_()
    for conv in (ours, theirs):
        conv.requires_grad_(False)
    found, expected = (torch.autograd.grad(conv(x).square().sum(), x)[0] for conv in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_training_after_inference_mode() -> None:
    """Tables that were first made in inference mode must not be kept for training."""
    _tables.cache_clear()
    conv = Conv2d(32, 10, 3, padding=1)
    x = torch.randn(2, 32, 4, 4)
    with torch.inference_mode():
        evaluated = conv(x)
    trained = conv(x.requires_grad_())
    trained.sum().backward()
    assert torch.equal(evaluated, trained)


def test_threads_give_the_bits_of_one() -> None:
    def step(seed: int) -> list[Tensor]:
        case = SMALL[seed % len(SMALL)]
        generator = torch.Generator().manual_seed(seed)
        conv = Conv2d(case[1], case[2], case[4], case[5], case[4] // 2, bias=False)
        conv.weight.data = torch.randn(conv.weight.shape, generator=generator)
        return gradients(conv, torch.randn(case[0], case[1], case[3], case[3], generator=generator))

    expected = [step(seed) for seed in range(20)]
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:  # torch counts per thread
        for found, alone in zip(pool.map(step, range(20)), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_a_trace_sees_every_operation() -> None:
    """Tools that follow tensors through torch functions find no gap between a convolution's input and its output."""

    class Follow(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.reached: set[int] = set()
            self.kept: list[Tensor] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            flat = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else [arg])]
            if any(id(a) in self.reached for a in flat):
                made = [r for r in (result if isinstance(result, list | tuple) else [result]) if isinstance(r, Tensor)]
                self.kept += made
                self.reached |= {id(r) for r in made}
            return result

    for case in SMALL:
        conv, _, x = pair(case, torch.float32)
        with Follow() as follow:
            follow.reached.add(id(x))
            y = conv(x)
        assert id(y) in follow.reached


@pytest.mark.parametrize(("size", "products"), [(2, 3), (4, 6), (8, 12)])
def test_tables_filter_a_line_in_few_products(size: int, products: int) -> None:
    B, G, A = _tables(size)
    tiles = max(1, size // 4)
    assert B.shape == (products, size)
    assert A.shape == (size, products)
    per_tile = products // tiles
    assert G.shape == (per_tile**2, 9)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(size, size)), rng.normal(size=(3, 3))
    weights = (G @ w.ravel()).reshape(per_tile, per_tile).repeat(tiles, axis=0).repeat(tiles, axis=1)
    y = A @ (weights * (B @ x @ B.T)) @ A.T
    padded = np.pad(x, 1)
    expected = sum(w[i, j] * padded[i : i + size, j : j + size] for i in range(3) for j in range(3))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-13)


def test_a_whole_step_in_double_precision() -> None:
    torch.manual_seed(0)
    fast, plain = ResNet18().double(), ResNet18(fast=False).double()
    plain.load_state_dict(fast.state_dict())
    x, target = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.arange(4)
    losses = [F.cross_entropy(model(x), target) for model in (fast, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for (name, found), expected in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert relative(found.grad, expected.grad) < 1e-9, name


class Products(TorchDispatchMode):
    """Counts the batched products of matrices with more than one row of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["frozen weights", "gradients of inputs"])
def test_no_product_for_gradients_that_nobody_asks_for(how: str) -> None:
    conv, _, x = pair((2, 32, 10, 4, 3, 1), torch.float64)

    def cut_gradient(asking: Any, frozen: bool = False) -> tuple[Tensor, int]:
        conv.requires_grad_(not frozen)
        z = x.clone().requires_grad_()
        loss = conv(z).square().sum()
        with asking, Products() as products:
            (gradient,) = torch.autograd.grad(loss, z)
        return gradient, products.count

    expected, all_products = cut_gradient(nullcontext())
    asking = gradients_of_inputs() if how == "gradients of inputs" else nullcontext()
    found, products = cut_gradient(asking, frozen=how == "frozen weights")
    assert torch.equal(found, expected)
    assert products == all_products - 1


def test_gradients_of_inputs_can_be_differentiated_by_weights() -> None:
    conv, theirs, x = pair((2, 32, 10, 4, 3, 1), torch.float64)
    second = []
    for layer in (conv, theirs):
        z = x.clone().requires_grad_()
        with gradients_of_inputs():
            (first,) = torch.autograd.grad(layer(z).square().sum(), z, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), layer.weight)[0])
    torch.testing.assert_close(*second, rtol=1e-9, atol=1e-9)

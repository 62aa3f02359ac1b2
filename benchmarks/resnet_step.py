"""A ResNet-18 training step with this package's layers against the same step with the plain ones of `torch.nn`.

Forward, loss, backward and Adam: the processor time of one thread, for others may use the machine too. The plain side
stores tensors contiguously; its Adam is torch's default one, the fast side's is the fused one that this package uses. A
second line has the fused one on both sides. Both sides keep freed memory, as runs do.
"""

import copy
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from benchmarks.timing import CONSOLE, Ratio, compare_cpu, note
from fsl_sage.engines.process import prepare_process
from fsl_sage.models import ResNet18

STAGES = {
    "stem": ("conv1", "bn1", "maxpool", "relu"),
    "layer1": ("layer1",),
    "layer2": ("layer2",),
    "layer3": ("layer3",),
    "layer4": ("layer4",),
}


def models() -> tuple[ResNet18, ResNet18]:
    """The fast and the plain model, with the same weights."""
    torch.manual_seed(0)
    fast, plain = ResNet18(), ResNet18(fast=False)
    plain.load_state_dict(fast.state_dict())
    return fast, plain


def images(batch_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch_size, 3, 32, 32, generator=generator), torch.randint(
        10, (batch_size,), generator=generator
    )


def training_step(model: nn.Module, batch_size: int, fused: bool) -> Callable[[], None]:
    x, target = images(batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


def stage_pass(model: nn.Module, stage: str, batch_size: int) -> Callable[[], None]:
    """Forward and backward through one stage, from the activations that really reach it."""
    x, _ = images(batch_size)
    for name, names in STAGES.items():
        part = nn.Sequential(*(model.get_submodule(n) for n in names))
        if name == stage:
            break
        x = part(x).detach()
    x.requires_grad_(stage != "stem")
    gradient = torch.randn_like(part(x))

    def run() -> None:
        part.zero_grad()
        x.grad = None
        part(x).backward(gradient)

    return run


def alignment_pass(model: nn.Module, batch_size: int) -> Callable[[], None]:
    """The double backward of alignment: layer3, pool and a linear layer learn from the gradient of their input."""
    torch.manual_seed(0)
    auxiliary = nn.Sequential(*(copy.deepcopy(model.get_submodule(n)) for n in ("layer3", "avgpool")), nn.Flatten())
    auxiliary.append(nn.Linear(256, 10))
    z = torch.randn(batch_size, 128, 4, 4).relu().requires_grad_()
    _, target = images(batch_size)

    def run() -> None:
        auxiliary.zero_grad()
        (gradient,) = torch.autograd.grad(F.cross_entropy(auxiliary(z), target), z, create_graph=True)
        gradient.square().sum().backward()

    return run


def differences(batch_size: int, dtype: torch.dtype) -> tuple[float, float]:
    """Relative differences of the loss, and of the gradients, the largest over all parameters.

    In single precision the last bit decides on which side of a ReLU a value near 0 falls, and with it a whole term of
    the gradient, in any implementation. So gradients of the whole step are only comparable in double precision.
    """
    losses, gradients = [], []
    x, target = images(batch_size)
    for model in models():
        model.to(dtype)
        loss = F.cross_entropy(model(x.to(dtype)), target)
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    largest = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*gradients, strict=True))
    return abs(losses[0] - losses[1]) / losses[1], largest


def convolution_differences(batch_size: int) -> float:
    """The largest relative difference of any convolution's output and gradients, given the inputs that reach it."""
    largest = 0.0
    fast, plain = models()
    inputs: dict[str, Tensor] = {}
    for name, module in plain.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].detach()}))
    plain(images(batch_size)[0])
    for name, x in inputs.items():
        results = []
        for model in (fast, plain):
            conv, leaf = model.get_submodule(name), x.clone().requires_grad_()
            y = conv(leaf)
            gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
            results.append([y, *torch.autograd.grad(y, [leaf, conv.weight], gradient)])
        differs = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*results, strict=True)]
        largest = max(largest, *differs)
    return largest


def milliseconds(seconds: list[float]) -> str:
    low, middle, high = (1e3 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def row(table: Table, name: str, ratio: Ratio) -> None:
    spread = f"{ratio.median:.2f} ({min(ratio.values):.2f} to {max(ratio.values):.2f})"
    table.add_row(name, milliseconds(ratio.a), milliseconds(ratio.b), spread)


def products_over_convolutions(batch_size: int) -> Ratio:
    """The time of a product of matrices over that of the same multiplications as a 1x1 convolution.

    The first is MKL's, the second oneDNN's. On an AMD CPU MKL does without AVX-512, so where its units are that wide
    this ratio is about 2, and this package's layers, which are products on small maps, gain less over plain ones.
    """
    x = torch.randn(batch_size, 256, 8, 8).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(256, 256, 1, 1)
    pixels, matrix = torch.randn(batch_size * 64, 256), torch.randn(256, 256)
    return compare_cpu(lambda: pixels @ matrix, lambda: F.conv2d(x, weight), 15)


def main(batch_size: int = 256, repeats: int = 7) -> None:
    """Print the ratios, plain over fast, and how far the numbers differ."""
    threads = torch.get_num_threads()
    prepare_process(threads=1)
    fast, plain = models()
    title = f"ResNet-18, batch {batch_size}, 32x32, one thread: ms, median (least to most of {repeats})"
    table = Table("", "plain", "fast", "plain / fast", title=title)
    step = training_step(fast, batch_size, fused=True)
    whole = compare_cpu(training_step(plain, batch_size, fused=False), step, repeats)
    row(table, "whole step", whole)
    note(f"a ResNet-18 step of plain layers over this package's, batch {batch_size}", whole.median)
    row(table, "with fused Adam on both", compare_cpu(training_step(plain, batch_size, fused=True), step, repeats))
    table.add_section()
    for stage in STAGES:
        sides = (stage_pass(model, stage, batch_size) for model in (plain, fast))
        row(table, stage, compare_cpu(*sides, repeats))
    sides = (alignment_pass(model, batch_size) for model in (plain, fast))
    row(table, "alignment of layer3", compare_cpu(*sides, repeats))
    CONSOLE.print(table)
    with torch.no_grad():
        ratio = products_over_convolutions(batch_size)
    CONSOLE.print(f"The same multiplications by a product of matrices, over those by a 1x1 convolution: {ratio}")
    note("a product of matrices over the same multiplications as a convolution", ratio.median)
    loss, _ = differences(batch_size, torch.float32)
    _, gradients = differences(min(batch_size, 64), torch.float64)
    convolution = convolution_differences(batch_size)
    CONSOLE.print(
        "Largest relative differences, plain against fast:\n"
        f"  loss of the step, single precision                              {loss:.1e}\n"
        f"  output and gradients of any one convolution, single precision   {convolution:.1e}\n"
        f"  gradients of the whole step, double precision                   {gradients:.1e}"
    )
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()

"""What `--precision bf16` saves on this CPU: processor seconds in float32 over those in bfloat16, one thread.

A training step of ResNet-18, and rounds of FSL-SAGE, CSE-FSL and FedAvg with four clients of two steps each, batch 256,
without alignment and evaluation. On a CPU without products of bfloat16 numbers there is nothing to save.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.resnet_step import images
from benchmarks.rounds import Ours, config_for
from benchmarks.timing import CONSOLE, at_least, compare_cpu, note
from fsl_sage.engines.process import prepare_process
from fsl_sage.experiment.setup import make_setup
from fsl_sage.models import ResNet18
from fsl_sage.models.conv import _by_products
from fsl_sage.precision import multiplies_bfloat16

BATCH, STEPS = 256, 2


def training_step(*, brief: bool) -> Callable[[], None]:
    """Forward, loss, backward and Adam of ResNet-18."""
    torch.manual_seed(0)
    model = ResNet18()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    x, target = images(BATCH)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=brief):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()

    return step


def errors(channels: int, size: int) -> tuple[float, float]:
    """Relative errors of a 3x3 convolution by bfloat16 factors: as it is computed, and by Winograd's products."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, channels, size, size, generator=draw).relu().bfloat16()
    weight = (torch.randn(channels, channels, 3, 3, generator=draw) / (9 * channels) ** 0.5).bfloat16()
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    found = (F.conv2d(x, weight, padding=1), _by_products(x, weight))
    direct, winograd = (float((y.double() - exact).norm() / exact.norm()) for y in found)
    return direct, winograd


def rates(channels: int, size: int) -> tuple[float, float]:
    """How fast a 3x3 convolution goes: in bfloat16 and in float32, over a large product of bfloat16 matrices.

    Speed is that of the multiplications of a direct convolution, forward, in the time that each takes.
    """
    x = torch.randn(BATCH, channels, size, size).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3)
    brief = x.bfloat16(), weight.bfloat16()
    matrix = torch.randn(1024, 1024).bfloat16()
    with torch.no_grad():
        in_bf16 = compare_cpu(lambda: F.conv2d(*brief, padding=1), lambda: matrix @ matrix, 15)
        in_float32 = compare_cpu(lambda: _by_products(x, weight), lambda: matrix @ matrix, 15)
    work = x.numel() * channels * 9 / 1024**3
    return work / in_bf16.median, work / in_float32.median


def rounds_of(algorithm: str, precision: str) -> Ours:
    """Plays rounds of this algorithm."""
    config = config_for(algorithm, "resnet18", BATCH)
    data = replace(config.data, train_images=4 * STEPS * BATCH)
    return Ours(make_setup(replace(config, precision=precision, data=data)))


def main(repeats: int = 5) -> None:
    """Print the ratios."""
    if not multiplies_bfloat16():
        CONSOLE.print("This CPU has no products of bfloat16 numbers (AVX-512 BF16 or AMX): bf16 does not pay here.")
        return
    threads = torch.get_num_threads()
    prepare_process(threads=1)
    ratio = compare_cpu(training_step(brief=False), training_step(brief=True), repeats)
    CONSOLE.print(f"a ResNet-18 step, batch {BATCH}, float32 over bf16: {ratio}")
    note(f"a ResNet-18 step in float32 over one in bf16, batch {BATCH}", ratio.median, at_least(1.5))
    for channels, size in ((64, 8), (128, 4)):
        direct, winograd = errors(channels, size)
        CONSOLE.print(
            f"a 3x3 convolution of {channels} channels on {size}x{size} in bf16 is off by {direct:.2%}; by Winograd's "
            f"products, which float32 takes there, it would be by {winograd:.2%}"
        )
        in_bf16, in_float32 = rates(channels, size)
        CONSOLE.print(
            f"  its multiplications are done {in_bf16:.2f} times as fast as those of a large bf16 product; in float32, "
            f"by Winograd's products, as if {in_float32:.2f} times"
        )
    for algorithm in ("fsl-sage", "cse-fsl", "fedavg"):
        sides = [rounds_of(algorithm, precision) for precision in ("float32", "bf16")]
        ratio = compare_cpu(*(side.play for side in sides), 2)
        CONSOLE.print(f"a round of {algorithm}, batch {BATCH}, float32 over bf16: {ratio}")
        note(f"a round of {algorithm} in float32 over one in bf16, batch {BATCH}", ratio.median, at_least(1.5))
        for side in sides:
            side.close()
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()

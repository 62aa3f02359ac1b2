"""The client's peak training memory: the estimate of `cut_points` against what a fresh process really takes.

    python -m benchmarks.cut_memory

For three models at three cuts each, a fresh process builds the client's side alone from its plan, takes three training
steps with Adam and a given cut gradient, and reports the growth of its peak resident memory since before the client was
built. The C library is told to give freed memory back at once, so that the peak is the tensors' and not its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.timing import CONSOLE, Goal, note
from fsl_sage.models import ResNet18
from fsl_sage.split import Analysis, SplitPlan, build_side, cut_points

TOLERANCE = 0.2
CLEAR_REFS = Path("/proc/self/clear_refs")
Model = tuple[Callable[[], nn.Module], dict[str, Any] | torch.Tensor, tuple[str, str, str]]


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=8000, n_positions=256, bos_token_id=1, eos_token_id=2)
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=384,
            num_hidden_layers=8,
            num_attention_heads=6,
            intermediate_size=1536,
            image_size=64,
            patch_size=8,
        )
    )


def models() -> dict[str, Model]:
    return {
        "ResNet-18, 32x32, batch 128": (ResNet18, torch.randn(128, 3, 32, 32), ("layer1", "layer2", "layer3")),
        "GPT-2, 6 layers of 384, 8 x 256 tokens": (
            gpt2,
            {"input_ids": torch.randint(8000, (8, 256)), "use_cache": False},
            ("transformer.h.0", "transformer.h.2", "transformer.h.4"),
        ),
        "ViT, 8 layers of 384, 64x64, batch 32": (
            vit,
            {"pixel_values": torch.randn(32, 3, 64, 64)},
            ("vit.layers.0", "vit.layers.3", "vit.layers.6"),
        ),
    }


def resident(key: str) -> int:
    """Bytes of `VmRSS` (now) or `VmHWM` (the peak)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure(name: str, plan: SplitPlan) -> int:
    """The growth of this process's peak memory by three training steps of the client's side."""
    factory, example, _ = models()[name]
    train(warm_up(), torch.randn(2, 3, 8, 8), steps=2)  # loads the libraries that a first step loads
    empty = build_side(factory, plan, "client")
    del example
    before = resident("VmRSS")
    CLEAR_REFS.write_text("5")  # the peak starts anew
    tensors = {
        key: torch.randn(t.shape) * 0.02 if t.is_floating_point() else torch.zeros_like(t, device="cpu")
        for key, t in empty.state_dict().items()
    }
    client = build_side(factory, plan, "client", tensors)
    del tensors
    train(client, models()[name][1], steps=3)
    return resident("VmHWM") - before


def warm_up() -> nn.Module:
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Flatten(2),
        nn.TransformerEncoderLayer(36, 2, 36, batch_first=True),
    )
    return nn.Sequential(*layers)


def train(client: nn.Module, batch: Any, steps: int) -> None:
    optimizer = torch.optim.Adam([p for p in client.parameters() if p.requires_grad], fused=True)
    for _ in range(steps):
        output = client(batch)
        smashed = [t for t in getattr(output, "tensors", (output,)) if t.requires_grad]
        torch.autograd.backward(smashed, [torch.zeros_like(t) for t in smashed])
        del output, smashed
        optimizer.step()
        optimizer.zero_grad()


def fresh_process(name: str, plan: SplitPlan) -> int:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    arguments = [sys.executable, "-m", "benchmarks.cut_memory", "--measure", name]
    done = subprocess.run(
        arguments, input=json.dumps(plan.to_dict()), capture_output=True, text=True, env=environment, check=True
    )
    return int(done.stdout.splitlines()[-1])


def compared(name: str) -> float:
    """Print a model's cuts; returns the largest deviation of the estimate."""
    factory, example, cuts = models()[name]
    model = factory()
    rows = {row.name: row for row in cut_points(model, example)}
    analysis = Analysis(model, example)
    plans = [analysis.plan([cut], tied="untie") for cut in cuts]
    with ThreadPoolExecutor(2) as pool:  # it is memory that is measured, not time
        peaks = list(pool.map(partial(fresh_process, name), plans))
    worst = 0.0
    for cut, measured in zip(cuts, peaks, strict=True):
        estimate = rows[cut].client_memory
        worst = max(worst, abs(estimate / measured - 1))
        figures = f"{estimate / 2**20:7.1f} MiB {measured / 2**20:7.1f} MiB {estimate / measured:6.2f}"
        CONSOLE.print(f"  {name:40} {cut:16} {figures}", soft_wrap=True)
    return worst


def main() -> int:
    """Print estimates and measurements; 1 if an estimate is off by more than is allowed."""
    torch.set_num_threads(1)
    CONSOLE.print("\n[bold]A client's peak training memory[/] (the estimate over what a fresh process took)")
    if not CLEAR_REFS.exists():
        CONSOLE.print("  not measured: it needs Linux, where a process can start its peak anew.")
        return 0
    names = list(models())
    if find_spec("transformers") is None:
        names = names[:1]
        CONSOLE.print("  GPT-2 and ViT are left out: they need `pip install fsl-sage\\[llm]`.")
    worst = max(map(compared, names))
    CONSOLE.print(f"  largest deviation {worst:.1%}; allowed {TOLERANCE:.0%}")
    note("a client's memory: largest deviation of the estimate", worst, Goal(TOLERANCE))
    return int(worst > TOLERANCE)


def command(arguments: list[str]) -> int:
    """The whole comparison, or, in a fresh process, one measurement; its plan comes on the standard input."""
    parser = argparse.ArgumentParser(description="The client's peak training memory, estimated and measured.")
    parser.add_argument("--measure", metavar="MODEL", help="measure one model; the plan comes on the standard input")
    options = parser.parse_args(arguments)
    if not options.measure:
        return main()
    torch.set_num_threads(1)
    print(measure(options.measure, SplitPlan.from_dict(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))

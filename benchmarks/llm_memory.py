"""Peak memory and time of GPT-2 medium under LoRA: a client, the S-server, their sum, and the whole model.

    python benchmarks/llm_memory.py
    python benchmarks/llm_memory.py --tokens 512 --steps 1

The model is at its real size with random weights, cut after the first of its 24 blocks; the auxiliary is the next three
blocks and the decoder. Each row is a fresh process that takes two training steps and reports its peak resident memory,
libraries included, what it had before the model, and the seconds of the last step. A process knows the whole model
on the meta device only, where nothing is allocated, and makes weights for its own parts alone. Of E2E's training pairs
99.8 % have fewer than 96 tokens; 512 is the length to which the LoRA paper's setting pads them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CUT, AUXILIARY = "base_model.model.transformer.h.0", "blocks:3"
THREADS = 1
Step = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """What one process found."""

    parameters: int
    trained: int
    libraries: int
    """Bytes before the model was made."""
    peak: int
    seconds: float
    """Of the last step."""


def gpt2_medium() -> nn.Module:
    """With LoRA on the attention's projections, rank 4, as in the LoRA paper's E2E setting."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))
    lora = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(model, lora)


class NextToken:
    """The loss of a language model: label-smoothed cross-entropy of every token given those before it."""

    def loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        logits = output.logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, target["tokens"][:, 1:].flatten(), label_smoothing=0.1)

    def terms(self, target: Mapping[str, Tensor]) -> int:
        return target["tokens"][:, 1:].numel()


# -- what each process does --------------------------------------------------------------------------------------------


def parts(batch: int, tokens: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Client, server and auxiliary on the meta device."""
    from fsl_sage.split import auxiliary, split_model

    with torch.device("meta"):
        model = gpt2_medium()
        example = {"input_ids": torch.zeros(batch, tokens, dtype=torch.long)}
    split = split_model(model, CUT, example)
    return split.client, split.server, auxiliary(split, AUXILIARY, aligned=False)


def made(part: nn.Module) -> nn.Module:
    """The part with random weights of its own, and nothing of the other parts."""
    from fsl_sage.split.skeleton import named_tensors, set_tensor

    for name, tensor in named_tensors(part).items():
        if tensor.is_floating_point():
            values = torch.empty(tensor.shape).normal_(std=0.02)
        else:
            values = torch.zeros(tensor.shape, dtype=tensor.dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        set_tensor(part, name, nn.Parameter(values, tensor.requires_grad) if is_parameter else values)
    return part


def optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=2e-4, fused=True)


def client(batch: int, tokens: int) -> tuple[list[nn.Module], Step]:
    """A client of FSL-SAGE: its own part, and the auxiliary for the cut gradient."""
    passes, inputs = set_up(batch, tokens)
    own, _, estimator = parts(batch, tokens)
    own, estimator = made(own), made(estimator)
    adam = optimizer(own)

    def step() -> None:
        smashed = own.train()(inputs).tensors
        gradient, _ = passes.cut_gradient(estimator, smashed, {"tokens": inputs["input_ids"]})
        torch.autograd.backward([z for z in smashed if z.requires_grad], gradient)
        adam.step()
        adam.zero_grad()

    return [own, estimator], step


def server(batch: int, tokens: int) -> tuple[list[nn.Module], Step]:
    """The S-server: one step on an upload."""
    passes, inputs = set_up(batch, tokens)
    _, own, _ = parts(batch, tokens)
    own = made(own)
    adam = optimizer(own)
    smashed = uploaded(batch, tokens)

    def step() -> None:
        passes.learn(own, smashed, {"tokens": inputs["input_ids"]}, cut_gradient=False)
        adam.step()
        adam.zero_grad()

    return [own], step


def alignment(batch: int, tokens: int) -> tuple[list[nn.Module], Step]:
    """The S-server: the true cut gradient of an upload, and one step of matching it, which differentiates twice."""
    from fsl_sage.alignment.dataset import Upload
    from fsl_sage.alignment.matching import matching_loss
    from fsl_sage.split import twice_differentiable_attention

    passes, inputs = set_up(batch, tokens)
    _, own, estimator = parts(batch, tokens)
    own, estimator = made(own), made(estimator)
    adam = optimizer(estimator)
    upload = Upload(uploaded(batch, tokens), {"tokens": inputs["input_ids"]})

    def step() -> None:
        with twice_differentiable_attention():
            target, _ = passes.cut_gradient(own, *upload)
            matching_loss(estimator, upload, target, 1.0, passes).backward()
        adam.step()
        adam.zero_grad()

    return [own, estimator], step


def whole(batch: int, tokens: int) -> tuple[list[nn.Module], Step]:
    """One machine that holds and fine-tunes the whole model, as every client of FedAvg does."""
    passes, inputs = set_up(batch, tokens)
    with torch.device("meta"):
        empty = gpt2_medium()
    own = made(empty)
    own.base_model.model.tie_weights()
    adam = optimizer(own)

    def step() -> None:
        passes.task.loss(own.train()(**inputs), {"tokens": inputs["input_ids"]}).backward()
        adam.step()
        adam.zero_grad()

    return [own], step


PROCESSES: dict[str, Callable[[int, int], tuple[list[nn.Module], Step]]] = {
    "client": client,
    "S-server, training": server,
    "S-server, alignment": alignment,
    "whole model": whole,
}


def set_up(batch: int, tokens: int) -> tuple[Any, dict[str, Tensor]]:
    from fsl_sage.alignment.passes import Passes

    return Passes(NextToken(), torch.device("cpu")), {"input_ids": torch.randint(50257, (batch, tokens))}


def uploaded(batch: int, tokens: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, tokens, 1024),)


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(name: str, batch: int, tokens: int, steps: int) -> Measured:
    torch.set_num_threads(THREADS)
    import peft  # noqa: F401  # libraries are loaded before what they had is noted
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    libraries = resident("VmRSS")
    modules, step = PROCESSES[name](batch, tokens)
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
    weights = {id(weight): weight for module in modules for weight in module.parameters()}.values()
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return Measured(sum(weight.numel() for weight in weights), trained, libraries, resident("VmHWM"), seconds)


def resident(key: str) -> int:
    """Bytes of `VmRSS` (now) or `VmHWM` (the peak)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def fresh_process(name: str, sizes: list[str]) -> Measured:
    """The C library is told to give freed memory back at once, so that the peak is the tensors' and not its own."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--measure", name, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--tokens", type=int, default=96, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=2, help="training steps of each process")
    parser.add_argument("--measure", choices=PROCESSES, help="be one of the processes")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asdict(measure(options.measure, options.batch, options.tokens, options.steps))))
        return
    print(f"GPT-2 medium with LoRA, {options.batch} x {options.tokens} tokens, {THREADS} thread\n")
    print(f"{'process':22} {'parameters':>12} {'trained':>9} {'libraries':>10} {'peak':>10} {'step':>8}")
    found = {}
    for name in PROCESSES:
        found[name] = row = fresh_process(name, sys.argv[1:])
        print(
            f"{name:22} {row.parameters:12,} {row.trained:9,} {row.libraries / 2**20:7.0f} MB "
            f"{row.peak / 2**20:7.0f} MB {row.seconds:6.1f} s",
            flush=True,
        )
    of_server = max(found["S-server, training"].peak, found["S-server, alignment"].peak)
    both, one = found["client"].peak + of_server, found["whole model"].peak
    print(
        f"\nclient + S-server: {both / 2**20:,.0f} MB, {both / one:.2f} times the whole model's {one / 2**20:,.0f} MB"
    )
    print(f"a client alone: {found['client'].peak / one:.2f} times")


if __name__ == "__main__":
    main()

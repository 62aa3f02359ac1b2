"""Peak memory and time of GPT-2 medium under LoRA: a client, the S-server, their sum, and the whole model.

    python benchmarks/llm_memory.py
    python benchmarks/llm_memory.py --tokens 512 --steps 1

The model is at its real size with random weights, cut after the first of its 24 blocks; the auxiliary is the next three
blocks and the decoder. Each row is a fresh process that takes two training steps and reports its peak resident memory,
libraries included, what it had before the model, and the seconds of the last step. A process reads the weights of its
own parts alone (`load_side`) from the model's files, which the benchmark writes first. Of E2E's training pairs
99.8 % have fewer than 96 tokens; 512 is the length to which the LoRA paper's setting pads them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fsl_sage.alignment.dataset import Upload
from fsl_sage.alignment.matching import matching_loss
from fsl_sage.alignment.passes import Passes
from fsl_sage.config import Config, DataConfig, LoRAConfig, ModelConfig
from fsl_sage.models import make_base_model, make_language_model
from fsl_sage.problems.texts.language_modelling import LanguageModelling
from fsl_sage.problems.texts.one_side import load_side
from fsl_sage.split import twice_differentiable_attention

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


def write_model(directory: Path) -> None:
    """GPT-2 medium with random weights as files, 1.4 GB."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    make_base_model("hf:gpt2-medium").save_pretrained(directory)


# -- what each process does --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The model's files and the size of a step."""

    directory: Path
    batch: int
    tokens: int

    @property
    def config(self) -> Config:
        data = DataConfig(name="e2e", sequence_length=self.tokens)
        return Config(data=data, model=ModelConfig(f"hf:{self.directory}"), lora=LoRAConfig(auxiliary="adapters"))

    def parts(self, *names: str) -> list[nn.Module]:
        return list(load_side(self.config, names).values())

    def passes(self) -> Passes:
        task = LanguageModelling(None, torch.device("cpu"), longest=self.tokens)
        return Passes(task, torch.device("cpu"))

    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(50257, (self.batch, self.tokens))}

    def target(self) -> dict[str, Tensor]:
        """Every token is learnt."""
        shape = self.batch, self.tokens
        return {"labels": torch.randint(50257, shape, dtype=torch.int32), "mask": torch.ones(shape, dtype=torch.bool)}

    def upload(self) -> Upload:
        return Upload((torch.randn(self.batch, self.tokens, 1024),), self.target())


def optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=2e-4, fused=True)


def client(work: Work) -> tuple[list[nn.Module], Step]:
    """A client of FSL-SAGE: its own part, and the auxiliary for the cut gradient."""
    own, estimator = work.parts("client", "auxiliary")
    adam, passes, inputs, target = optimizer(own), work.passes(), work.inputs(), work.target()

    def step() -> None:
        smashed = own.train()(**inputs).tensors
        gradient, _ = passes.cut_gradient(estimator, smashed, target)
        torch.autograd.backward([z for z in smashed if z.requires_grad], gradient)
        adam.step()
        adam.zero_grad()

    return [own, estimator], step


def server(work: Work) -> tuple[list[nn.Module], Step]:
    """The S-server: one step on an upload."""
    (own,) = work.parts("server")
    adam, passes, upload = optimizer(own), work.passes(), work.upload()

    def step() -> None:
        passes.learn(own, *upload, cut_gradient=False)
        adam.step()
        adam.zero_grad()

    return [own], step


def alignment(work: Work) -> tuple[list[nn.Module], Step]:
    """The S-server: the true cut gradient of an upload, and one step of matching it, which differentiates twice."""
    own, estimator = work.parts("server", "auxiliary")
    adam, passes, upload = optimizer(estimator), work.passes(), work.upload()

    def step() -> None:
        with twice_differentiable_attention():
            target, _ = passes.cut_gradient(own, *upload)
            matching_loss(estimator, upload, target, 1.0, passes).backward()
        adam.step()
        adam.zero_grad()

    return [own, estimator], step


def whole(work: Work) -> tuple[list[nn.Module], Step]:
    """One machine that holds and fine-tunes the whole model, as every client of FedAvg does."""
    own = make_language_model(work.config.model.name, work.config.lora)
    adam, passes, inputs, target = optimizer(own), work.passes(), work.inputs(), work.target()

    def step() -> None:
        passes.task.loss(own.train()(**inputs), target).backward()
        adam.step()
        adam.zero_grad()

    return [own], step


PROCESSES: dict[str, Callable[[Work], tuple[list[nn.Module], Step]]] = {
    "client": client,
    "S-server, training": server,
    "S-server, alignment": alignment,
    "whole model": whole,
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(name: str, work: Work, steps: int) -> Measured:
    torch.set_num_threads(THREADS)
    import peft  # noqa: F401  # libraries are loaded before what they had is noted
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    libraries = resident("VmRSS")
    modules, step = PROCESSES[name](work)
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
    # What two parts share is in memory once.
    weights = {weight.data_ptr(): weight for module in modules for weight in module.parameters()}.values()
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return Measured(sum(weight.numel() for weight in weights), trained, libraries, resident("VmHWM"), seconds)


def resident(key: str) -> int:
    """Bytes of `VmRSS` (now) or `VmHWM` (the peak)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def fresh_process(name: str, directory: Path, sizes: list[str]) -> Measured:
    """The C library is told to give freed memory back at once, so that the peak is the tensors' and not its own."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--measure", name, "--directory", str(directory), *sizes]
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
    parser.add_argument("--directory", type=Path, help="where the model's files are; made and removed if not given")
    options = parser.parse_args()
    if options.measure:
        work = Work(options.directory, options.batch, options.tokens)
        print(json.dumps(asdict(measure(options.measure, work, options.steps))))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        compare(Path(directory), options)


def compare(directory: Path, options: argparse.Namespace) -> None:
    print(f"GPT-2 medium with LoRA, {options.batch} x {options.tokens} tokens, {THREADS} thread\n")
    print(f"{'process':22} {'parameters':>12} {'trained':>9} {'libraries':>10} {'peak':>10} {'step':>8}")
    found = {}
    for name in PROCESSES:
        found[name] = row = fresh_process(name, directory, sys.argv[1:])
        print(
            f"{name:22} {row.parameters:12,} {row.trained:9,} {row.libraries / 2**20:7.0f} MiB "
            f"{row.peak / 2**20:7.0f} MiB {row.seconds:6.1f} s",
            flush=True,
        )
    of_server = max(found["S-server, training"].peak, found["S-server, alignment"].peak)
    both, one = found["client"].peak + of_server, found["whole model"].peak
    print(
        f"\nclient + S-server: {both / 2**20:,.0f} MiB, {both / one:.2f} times the whole model's {one / 2**20:,.0f} MiB"
    )
    print(f"a client alone: {found['client'].peak / one:.2f} times")


if __name__ == "__main__":
    main()

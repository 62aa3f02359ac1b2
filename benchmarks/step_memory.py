"""A client's memory in a step, as runs record it, against what a process really takes.

    python -m benchmarks.step_memory

For each algorithm a fresh process plays three local steps of a client of ResNet-18 cut after layer2, batch 128, by the
algorithm's own code; cut gradients that it waits for are zeros. Printed are the growth of its peak resident memory
(Linux), and the static and working bytes of the step. Both leave out what the interpreter and the libraries take.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import torch

from benchmarks.cut_memory import CLEAR_REFS, resident
from benchmarks.timing import CONSOLE
from fsl_sage.algorithms import resolve
from fsl_sage.config import Config, DataConfig, ModelConfig
from fsl_sage.engines.base import Delivery, Outcome, Setup
from fsl_sage.engines.worker import Worker
from fsl_sage.experiment.setup import make_setup
from fsl_sage.wire.message import CutGradients, Message

ALGORITHMS = ("fsl-sage", "cse-fsl", "splitfed-ss", "fedavg", "heron-sfl")
BATCH, STEPS = 128, 3


def setup_of(algorithm: str, batch: int) -> Setup:
    data = DataConfig(name="cifar10-mini", train_images=BATCH * STEPS, test_images=10)
    model = ModelConfig(name="resnet18", cut="layer2")
    plain = Config(algorithm=algorithm, model=model, data=data, clients=1, rounds=1, batch_size=batch)
    return make_setup(resolve(replace(plain, local_steps=STEPS)))


def play(setup: Setup, measured: int | None = None) -> Outcome:
    """The client's round; what it waits for is zeros."""
    conversation = Worker(setup).converse(0, 0, {}, Delivery(setup.initial, {}, measured=measured))
    reply: Message | None = None
    while isinstance(said := conversation(reply), Message):
        reply = CutGradients([torch.zeros_like(z) for z in said.smashed]) if setup.algorithm.waits else None
    assert isinstance(said, Outcome), said
    return said


def measure(algorithm: str) -> tuple[int, int, int]:
    """The growth of this process's peak; static and working bytes."""
    torch.set_num_threads(1)
    play(setup_of(algorithm, 2))  # loads the libraries that a first step loads
    setup = setup_of(algorithm, BATCH)
    before = resident("VmRSS")
    CLEAR_REFS.write_text("5")  # the peak starts anew
    play(setup)
    grown = resident("VmHWM") - before
    step = play(setup, measured=0).update.footprint
    assert step is not None
    return grown, step.static_bytes, step.working_bytes


def main() -> None:
    """Each algorithm in a process of its own, which gives freed memory back at once."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for algorithm in ALGORITHMS:
        command = [sys.executable, "-m", "benchmarks.step_memory", algorithm]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        grown, static, working = (size / 1e6 for size in json.loads(done.stdout.splitlines()[-1]))
        CONSOLE.print(
            f"  {algorithm:12} process {grown:6.1f} MB, static {static:6.1f}, working {working:6.1f}, "
            f"process over both {grown / (static + working):.2f}",
            soft_wrap=True,
        )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(measure(sys.argv[1])))
    elif not CLEAR_REFS.exists():
        sys.exit("It needs Linux, where a process can start its peak anew.")
    else:
        main()

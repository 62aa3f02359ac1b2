"""Many clients: the memory and the time of a round of 10, 1,000 and 10,000 clients, with a checkpoint after each.

    python -m benchmarks.scale                 every case below: an hour and more, and up to 45 GB of disk
    python -m benchmarks.scale NAME ...        these cases
    python -m benchmarks.scale --steps         what a client costs beside its steps: minutes, and 1 GB of disk
    python -m benchmarks.scale --list          their names

Every case is a run in a process of its own, with random images, one worker and one thread. Printed are the peak of its
anonymous memory (RssAnon: what is in no file; Linux), the seconds of a round with its checkpoint, by the clock and of
the processor (the median of the rounds after the first), the part of them that the checkpoint takes if there is one
after each round, how many rounds share one by default, and the files of clients' states. Ratios are of the processor's
seconds, which other processes of the machine change less, without those of checkpoints, which by default take a
twentieth at most.

Cases of a pair do equal work in a round: as many steps on batches as large, by 10 clients or by 1,000. A client's
state is read and written once in a round however many steps it takes, so the ratio falls with its steps: `--steps` has
pairs of 100 clients with 1, 4 and 16 steps each over 10 clients with ten times as many, and times the parts of that
work alone.
"""

import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.timing import CONSOLE
from fsl_sage import Config, Tracker, run
from fsl_sage.config import DataConfig, ModelConfig
from fsl_sage.engines.process import keep_freed_memory
from fsl_sage.experiment import runs
from fsl_sage.experiment.checkpoints import SHARE, Checkpoints
from fsl_sage.models.factory import make_model
from fsl_sage.roles.averaging import RunningMean

BATCH = 8
TEST_IMAGES = 100


@dataclass(frozen=True)
class Case:
    """One run."""

    algorithm: str
    clients: int
    cohort: float = 1.0
    optimizer: str = "keep"
    model: str = "resnet18"
    images: int = BATCH
    """Of each client."""
    rounds: int = 3
    memory_mib: int = 1024
    """For the states of all clients; what does not fit is in files."""
    options: tuple[tuple[str, Any], ...] = ()


FEW = (("align_every", 2), ("upload_every", 1))
CASES = {
    "fsl-sage, 10 of 10": Case("fsl-sage", 10, images=5 * BATCH, options=FEW),
    "fsl-sage, 50 of 1,000": Case("fsl-sage", 1000, cohort=0.05, options=FEW),
    "fsl-sage, 10 with equal work": Case("fsl-sage", 10, images=100 * BATCH, rounds=2, options=FEW),
    "fsl-sage, 1,000 of 1,000": Case("fsl-sage", 1000, rounds=2, options=FEW),
    "cse-fsl, 50 of 1,000": Case("cse-fsl", 1000, cohort=0.05),
    "cse-fsl, 1,000 of 1,000": Case("cse-fsl", 1000, rounds=2),
    "splitfed-ss, 50 of 1,000": Case("splitfed-ss", 1000, cohort=0.05),
    "splitfed-ss, 1,000 of 1,000": Case("splitfed-ss", 1000, rounds=2),
    "fedavg reset, 10 of 10": Case("fedavg", 10, optimizer="reset", images=5 * BATCH),
    "fedavg reset, 50 of 1,000": Case("fedavg", 1000, cohort=0.05, optimizer="reset"),
    "fedavg reset, 10 with equal work": Case("fedavg", 10, optimizer="reset", images=100 * BATCH, rounds=2),
    "fedavg reset, 1,000 of 1,000": Case("fedavg", 1000, optimizer="reset", rounds=2),
    "splitfed-ms reset, 50 of 1,000": Case("splitfed-ms", 1000, cohort=0.05, optimizer="reset"),
    "splitfed-ms reset, 1,000 of 1,000": Case("splitfed-ms", 1000, optimizer="reset", rounds=2),
    "small-cnn fsl-sage, 500 of 10,000": Case("fsl-sage", 10000, cohort=0.05, model="small-cnn", options=FEW),
    "small-cnn fedavg, 500 of 10,000": Case("fedavg", 10000, cohort=0.05, model="small-cnn"),
    "small-cnn fedavg, 10,000 of 10,000": Case("fedavg", 10000, model="small-cnn", rounds=2),
}
PAIRS = {
    "fsl-sage, cohort 0.05": ("fsl-sage, 50 of 1,000", "fsl-sage, 10 of 10"),
    "fsl-sage, cohort 1.0": ("fsl-sage, 1,000 of 1,000", "fsl-sage, 10 with equal work"),
    "fedavg reset, cohort 0.05": ("fedavg reset, 50 of 1,000", "fedavg reset, 10 of 10"),
    "fedavg reset, cohort 1.0": ("fedavg reset, 1,000 of 1,000", "fedavg reset, 10 with equal work"),
}


def by_steps(name: str, case: Case) -> tuple[dict[str, Case], dict[str, tuple[str, str]]]:
    """Cases and pairs of 100 clients with 1, 4 and 16 steps in a round, over 10 clients with ten times as many."""
    cases, pairs = {}, {}
    for steps in (1, 4, 16):
        many, few = f"{name}, 100 with {steps} steps", f"{name}, 10 with {10 * steps} steps"
        cases[many] = replace(case, clients=100, images=steps * BATCH)
        cases[few] = replace(case, clients=10, images=10 * steps * BATCH)
        pairs[f"{name}, {steps} steps of each"] = (many, few)
    return cases, pairs


SAGE_STEPS, SAGE_PAIRS = by_steps("fsl-sage", Case("fsl-sage", 100, rounds=2, memory_mib=0, options=FEW))
FEDAVG_STEPS, FEDAVG_PAIRS = by_steps("fedavg reset", Case("fedavg", 100, optimizer="reset", rounds=2))
STEPS = SAGE_STEPS | FEDAVG_STEPS


class Watch(Tracker):
    """Notes when rounds and their checkpoints end, and how large the files of clients' states are then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self.seconds: list[float] = []
        self.disk = 0

    def start(self, config: Config, directory: Path, metrics: list[dict[str, Any]]) -> None:
        self.directory = directory
        self.ends.append((time.perf_counter(), time.process_time()))

    def round(self, metrics: dict[str, Any]) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))
        self.seconds.append(metrics["seconds"])
        files = list((self.directory / "clients").glob("*"))
        self.disk = max(self.disk, sum(path.stat().st_size for path in files))


class TimedCheckpoints(Checkpoints):
    """Notes the processor's seconds of each checkpoint."""

    cpu: ClassVar[list[float]] = []

    @contextmanager
    def writing(self, rounds: int) -> Iterator[None]:
        start = time.process_time()
        with super().writing(rounds):
            yield
        self.cpu.append(time.process_time() - start)


def play(case: Case, folder: Path) -> dict[str, float]:
    """Run a case in this process."""
    rng = np.random.default_rng(0)
    count = case.clients * case.images + TEST_IMAGES
    images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", x=images, y=np.arange(count) % 10)
    del images
    data = DataConfig(name=f"npz:{folder / 'images.npz'}", test_fraction=TEST_IMAGES / count)
    config = Config(
        algorithm=case.algorithm,
        clients=case.clients,
        cohort=case.cohort,
        client_optimizer=case.optimizer,  # type: ignore[arg-type]
        batch_size=BATCH,
        rounds=case.rounds,
        workers=1,
        client_memory_mib=case.memory_mib,
        checkpoint_every=1,  # by default there would be fewer, so that they take a twentieth of the time at most
        data=data,
        model=ModelConfig(name=case.model),
        out=folder / "run",
        options=dict(case.options),
    )
    config = replace(config, alignment=replace(config.alignment, steps=4))
    watch = Watch()
    runs.Checkpoints = TimedCheckpoints  # type: ignore[misc]
    run(config, [watch])
    pairs = list(zip(watch.ends, watch.ends[1:], strict=False))
    whole, cpu = ([after[clock] - before[clock] for before, after in pairs] for clock in (0, 1))
    later = slice(1, None) if len(whole) > 1 else slice(None)
    checkpoints = [(w - s) / w for w, s in zip(whole, watch.seconds, strict=True)]
    without = [c - k for c, k in zip(cpu, TimedCheckpoints.cpu, strict=True)]
    return {
        "seconds": statistics.median(whole[later]),
        "cpu": statistics.median(cpu[later]),
        "without": statistics.median(without[later]),
        "checkpoint": statistics.median(checkpoints[later]),
        "disk": watch.disk,
    }


def measure(name: str) -> dict[str, float]:
    """Run a case in a process of its own, and look at its memory twenty times a second."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("FSL_SAGE_SCALE")) as folder:
        command = [sys.executable, "-m", "benchmarks.scale", "--play", name, folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.05)
        assert process.stdout is not None
        if process.returncode:
            sys.exit(f"{name} ended with {process.returncode}.")
        return {**json.loads(process.stdout.read().splitlines()[-1]), "memory": peak}


def bare() -> None:
    """Print the processor's time of what a client must have beside its steps, done alone: medians of 20."""
    keep_freed_memory()  # as runs have it
    torch.set_num_threads(1)
    weights = [each.detach() for each in make_model("resnet18", 10, (3, 32, 32)).parameters()]
    update = {str(number): each for number, each in enumerate(weights)}
    mean = RunningMean([1.0] * 20)
    state = memoryview(torch.randn(1_366_144).numpy()).cast("B")  # what Adam remembers of the client part
    with tempfile.TemporaryDirectory(dir=os.environ.get("FSL_SAGE_SCALE")) as folder:
        count = itertools.count()
        work: dict[str, Callable[[], object]] = {
            "fedavg: copy the weights": lambda: [each.clone() for each in weights],
            "fedavg: Adam's moments, new": lambda: [torch.zeros_like(each) for each in (*weights, *weights)],
            "fedavg: add an update to the sum in float64": lambda: mean.add(update),
            "fsl-sage: SHA-256 of the optimizer's state": lambda: hashlib.sha256(state).digest(),
            "fsl-sage: write it to a new file": lambda: Path(folder, str(next(count))).write_bytes(state),
        }
        for name, does in work.items():
            CONSOLE.print(f"  {name:46} {statistics.median(_cpu(does) for _ in range(20)) * 1000:5.1f} ms")


def _cpu(does: Callable[[], object]) -> float:
    start = time.process_time()
    does()
    return time.process_time() - start


def rounds_of_one(part: float) -> int:
    """How many rounds share a checkpoint by default, if it takes this part of the time with one after each round."""
    alone = part / (1 - part)  # over the time of a round without it
    return max(1, math.ceil(alone * (1 / SHARE - 1)))


def anonymous(pid: int) -> int:
    """The anonymous memory of a process; 0 when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0


def main(names: list[str]) -> None:
    """Print each case, then the pairs."""
    cases = CASES | STEPS
    found: dict[str, dict[str, float]] = {}
    for name in names:
        found[name] = own = measure(name)
        CONSOLE.print(
            f"  {name:36} RssAnon {own['memory'] / 1e9:5.2f} GB, "
            f"round {own['seconds']:7.1f} s ({own['cpu']:6.1f} s CPU), of it "
            f"the checkpoint {own['checkpoint']:4.0%} (by default one in {rounds_of_one(own['checkpoint'])} rounds), "
            f"clients' files {own['disk'] / 1e9:6.2f} GB",
            soft_wrap=True,
        )
    for pair, (many, few) in (PAIRS | SAGE_PAIRS | FEDAVG_PAIRS).items():
        if many in found and few in found:
            longer, shorter = found[many]["without"], found[few]["without"]
            clients = round(cases[many].clients * cases[many].cohort)
            each = (longer - shorter) / (clients - cases[few].clients)
            CONSOLE.print(
                f"  {pair}: {clients} clients over {cases[few].clients}, equal work: {longer / shorter:.2f} "
                f"(goal: at most 1.2), {each * 1000:.1f} ms for each client more",
                soft_wrap=True,
            )


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--play"]:
        warnings.simplefilter("ignore")
        print(json.dumps(play((CASES | STEPS)[arguments[1]], Path(arguments[2]))))
    elif arguments == ["--list"]:
        print("\n".join(CASES | STEPS))
    elif not Path("/proc/self/status").exists():
        sys.exit("It needs Linux, which tells how much memory of a process is in no file.")
    elif arguments == ["--steps"]:
        main(list(STEPS))
        bare()
    else:
        main(arguments or list(CASES))

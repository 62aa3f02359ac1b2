"""The Ray engine: exchanges against a bare actor's echo, two workers against one, 200 clients against 20.

Both sides of every ratio are taken in turn in the same run. Nothing is trained in the exchanges, so that what is timed
is the engine: the way up and down, its messages, its order and its bill.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.rounds import config_for
from benchmarks.timing import CONSOLE, Goal, compare, note
from fsl_sage.algorithms import Algorithm
from fsl_sage.config import AlignmentConfig, Config, DataConfig, GivenOptions, ModelConfig
from fsl_sage.engines.base import Delivery, Setup
from fsl_sage.experiment import Federation, run
from fsl_sage.experiment.setup import make_setup
from fsl_sage.roles.replica import Slots
from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import ACTIVATIONS, CUT_GRADIENTS, Message

MIB = 2**20
STEPS = 20


class Exchanges(Algorithm):
    """Clients that send 2 MiB at each of a number of steps and get as much back; nobody computes anything."""

    waits = True

    def local_round(self, client, t):
        batch = torch.randn(2 * MIB // 4)
        for _ in range(STEPS):
            yield Message({ACTIVATIONS: {"0": batch}})

    def on_upload(self, server, client, upload):
        return Message({CUT_GRADIENTS: dict(upload.parts[ACTIVATIONS])})


class Replies(Algorithm):
    """Clients that get 50 MiB of weights, do nothing, and send them to the F-server."""

    has_s_server = False

    def local_round(self, client, t):
        yield from ()


def setup_for(algorithm: type[Algorithm], parameters: int | None = None) -> Setup:
    """A small run with this algorithm, and a client part with so many parameters."""
    data, model = DataConfig(train_images=20), ModelConfig("small-cnn")
    setup = make_setup(Config(clients=4, workers=1, device="cpu", data=data, model=model))
    setup = replace(setup, algorithm=algorithm(setup.settings.config))
    if parameters is not None:
        module = nn.ParameterList(torch.randn(parameters // 25) for _ in range(25))
        setup = replace(setup, modules={**setup.modules, "client": module}, initial={"client": Slots(module).tensors()})
    return setup


class Bare:
    """An actor that gives back what it gets."""

    def echo(self, array: np.ndarray) -> np.ndarray:
        return array


def exchanges(repeats: int = 9) -> None:
    """The engine's ways against a bare actor's."""
    import ray

    from fsl_sage.engines.ray import RayEngine

    CONSOLE.print("\n[bold]Exchanges on Ray against a bare actor's echo of the same array[/] (at most 3)")
    bare = ray.remote(Bare).remote()
    for name, setup, size, clients, times in (
        ("a 2 MiB batch and back", setup_for(Exchanges), 2 * MIB, [0], STEPS),
        ("50 MiB of weights and back", setup_for(Replies, 50 * MIB // 4), 50 * MIB, [0, 1, 2, 3], 4),
    ):
        engine = RayEngine(setup)
        weights = {"client": setup.initial["client"]}
        array = np.random.default_rng(0).random(size // 4, np.float32)

        def exchange() -> None:
            engine.train(0, clients, Delivery(weights, {}), Link(Ledger()))  # noqa: B023

        def echo() -> None:
            for _ in range(times):  # noqa: B023
                ray.get(bare.echo.remote(array))  # noqa: B023

        ratio = compare(exchange, echo, repeats)
        CONSOLE.print(f"  {name:<28} {ratio} for {times} of them")
        note(f"on Ray, {name} over an actor's echo", ratio.median, Goal(3))
        engine.close()


def two_workers(repeats: int = 2) -> None:
    """Two workers over one in rounds of FSL-SAGE that don't align.

    With batches of 256 clients have more of the work than with 64; 10 steps are half of the paper's round.
    """
    from fsl_sage.engines.ray import RayEngine

    CONSOLE.print("\n[bold]A round with two workers over one[/] (at most 0.6 on two cores; the bits are the same)")
    data = DataConfig(train_images=4 * 4 * 256, test_images=100)
    for batch_size, steps in ((256, 10), (64, 8)):
        config = replace(config_for("fsl-sage", "resnet18", batch_size), local_steps=steps, data=data)
        sides = []
        for workers in (2, 1):
            setup = make_setup(replace(config, workers=workers))
            federation = Federation(setup, RayEngine(setup))
            rounds = iter(range(1, 1000))  # round 0 would align
            sides.append((federation, partial(_play, federation, rounds)))
        ratio = compare(*(play for _, play in sides), repeats)
        CONSOLE.print(f"  resnet18   fsl-sage   {steps:>2} x {batch_size:<3}   {ratio}")
        note(f"two workers over one on Ray, {steps} steps of {batch_size}", ratio.median, Goal(0.6))
        for federation, _ in sides:
            federation.engine.close()


def _play(federation, rounds) -> None:
    federation.play_round(next(rounds), list(range(4)))


def memory() -> None:
    """200 clients over 20: the same images, and alignment datasets that hold as many samples together."""
    CONSOLE.print("\n[bold]Memory of 200 clients over 20[/] (two workers, small-cnn, three rounds; below 1.5)")
    for algorithm in ("fsl-sage", "splitfed-ss", "fedavg"):
        peaks = [_peak(algorithm, clients) for clients in (200, 20)]
        CONSOLE.print(
            f"  {algorithm:<12} {peaks[0] / peaks[1]:.2f} ({peaks[0] / MIB:.0f} MiB / {peaks[1] / MIB:.0f} MiB)"
        )
        note(f"on Ray, memory of 200 clients over 20, {algorithm}", peaks[0] / peaks[1], Goal(1.5))


def _peak(algorithm: str, clients: int) -> int:
    """The most that a run and everything it has started take at a time, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.ray_engine", algorithm, str(clients)]
    with subprocess.Popen(command) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(_resident, _descendants(process.pid))))
            time.sleep(0.1)
        if process.returncode:
            raise RuntimeError(f"{algorithm} with {clients} clients failed.")
    return peak


def _descendants(root: int) -> list[int]:
    """The process and all that it has started, Ray's included."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _resident(pid: int) -> int:
    """Bytes of a process; what it shares with others is counted in shares."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def run_with(algorithm: str, clients: int) -> None:
    """Three whole rounds, with alignment, evaluation and checkpoints."""
    with tempfile.TemporaryDirectory() as directory:
        run(
            Config(
                algorithm=algorithm,
                clients=clients,
                rounds=3,
                options=GivenOptions({"align_every": 2}, of_several=True),
                engine="ray",
                workers=2,
                device="cpu",
                out=Path(directory) / "run",
                model=ModelConfig("small-cnn"),
                alignment=AlignmentConfig(samples=4000 // clients),
            )
        )


def main(with_memory: bool = False) -> None:
    """Print all ratios; the memory of many clients, which takes minutes, only if asked for."""
    try:
        import ray
    except ImportError:
        CONSOLE.print("\nThe Ray engine is not measured: it needs the extra 'ray'.")
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    torch.set_num_threads(1)
    if with_memory:
        memory()
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    exchanges()
    two_workers()
    ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1:]:
        run_with(sys.argv[1], int(sys.argv[2]))
    else:
        main(with_memory=True)

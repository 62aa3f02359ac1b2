"""Clients one by one over clients as one stack (--clients-at-once), for small batches.

    python -m benchmarks.batched_clients                # on the device that `--device auto` picks
    python -m benchmarks.batched_clients --device cuda  # on another

Rounds of 50 clients of the small CNN with four steps each, one worker, one thread; the S-server's part in a round is on
both sides, and is not stacked. Above 1 the stack is faster. It is meant for GPUs. On a CPU, where a convolution of a
stack is a grouped one and the package's own layers are not used, it is faster for the smallest batches alone.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.rounds import Ours
from benchmarks.timing import CONSOLE, compare
from fsl_sage.config import Config, DataConfig, GivenOptions, ModelConfig
from fsl_sage.experiment.setup import make_setup

CLIENTS = 50
STEPS = 4


def config_for(algorithm: str, batch_size: int, device: str) -> Config:
    """Clients with as many examples each; no alignment, which is not stacked."""
    return Config(
        algorithm=algorithm,
        clients=CLIENTS,
        rounds=1000,
        batch_size=batch_size,
        local_steps=STEPS,
        options=GivenOptions({"align_every": 1000}, of_several=True),
        workers=1,
        device=device,
        data=DataConfig(train_images=CLIENTS * batch_size, test_images=100),
        model=ModelConfig(name="small-cnn"),
    )


def main(device: str = "auto", repeats: int = 3) -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    CONSOLE.print(f"\n[bold]Clients one by one over a stack[/] (time over time; {CLIENTS} clients, small CNN)")
    for algorithm in ("fedavg", "fsl-sage"):
        for batch_size in (10, 32):
            for at_once in (10, CLIENTS):
                config = config_for(algorithm, batch_size, device)
                sides = [Ours(make_setup(replace(config, clients_at_once=count))) for count in (1, at_once)]
                ratio = compare(*(_waiting(side) for side in sides), repeats=repeats)
                CONSOLE.print(f"  {algorithm:<9} batch {batch_size}, {at_once} at once: {ratio}")
                for side in sides:
                    side.close()


def _waiting(side: Ours) -> Callable[[], None]:
    """A round of this side that is over when the device has done it."""

    def play() -> None:
        side.play()
        if side.federation.setup.settings.device.type == "cuda":
            torch.cuda.synchronize()

    return play


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    main(parser.parse_args().device)

"""An alignment of 10 clients against one as in the authors' code (preset `paper`): the time and the fidelity of both.

python -m benchmarks.alignment                the default alignment, on the small images that come with the package
python -m benchmarks.alignment --two-cores    that of experiments/paper/cifar10-two-cores.toml, in its own setting:
                                              all 50,000 images in batches of 256; ten minutes on two cores
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.timing import CONSOLE, note
from fsl_sage.config import Config, DataConfig, given_options, load_preset
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment import Federation
from fsl_sage.experiment.setup import make_setup

TWO_CORES = Path(__file__).parents[1] / "experiments" / "paper" / "cifar10-two-cores.toml"
NEVER = {"align_every": 1000, "align_at": "end"}


class Measured(NamedTuple):
    """Held-out fidelity is the cosine of estimated and true cut gradients, on uploads that no alignment has seen."""

    seconds: float
    before: float
    after: list[float]
    """At the end of each round since, in which clients and server have moved on."""


def measure(config: Config, warm: int, rounds: int) -> Measured:
    """Play rounds without alignment, align once, and play rounds with what that gave."""
    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    clients = list(range(config.clients))
    for t in range(1, 1 + warm):
        federation.play_round(t, clients)
    before = federation.engine.server.fidelity()
    start = time.perf_counter()
    federation.engine.server.end_of_round(0)  # round 0 is a multiple of every interval
    seconds = time.perf_counter() - start
    after = [federation.play_round(1 + warm + t, clients)["fidelity_cosine"] for t in range(rounds)]
    federation.engine.close()
    assert before is not None
    return Measured(seconds, before.cosine, after)


def against_paper(name: str, config: Config, warm: int, rounds: int) -> float:
    """Print both; returns the ratio of their times."""
    paper = replace(config, alignment=load_preset("paper").alignment)
    results = {name: measure(config, warm, rounds), "paper": measure(paper, warm, rounds)}
    for which, found in results.items():
        after = ", ".join(f"{cosine:.3f}" for cosine in found.after)
        CONSOLE.print(f"  {which:<9} {found.seconds:7.1f} s   cosine {found.before:.3f}, then by round {after}")
    ratio = results["paper"].seconds / results[name].seconds
    CONSOLE.print(f"  time of paper / {name}: {ratio:.1f}")
    return ratio


def main(warm: int = 1) -> None:
    """The default alignment."""
    CONSOLE.print("\n[bold]Aligning 10 clients[/] (ResNet-18, batch 64, all cores)")
    data = DataConfig(train_images=5000, test_images=100)
    config = Config(clients=10, rounds=100, batch_size=64, options=NEVER, device="cpu", data=data)
    note("an alignment as in the authors' code over the default", against_paper("default", config, warm, rounds=1))


def two_cores() -> None:
    """The alignment of the paper's setting on two cores."""
    CONSOLE.print("\n[bold]Aligning 10 clients[/] (ResNet-18, 50,000 images, batch 256, all cores)")
    config = load_preset(TWO_CORES)
    options = {**given_options(config.options), **NEVER}
    config = replace(config, options=options, data=replace(config.data, test_images=100))
    against_paper("two cores", config, warm=1, rounds=2)


if __name__ == "__main__":
    two_cores() if sys.argv[1:] == ["--two-cores"] else main()

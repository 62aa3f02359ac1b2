"""The peak memory of rounds over that of the same algorithm as it is usually written.

    python -m benchmarks.round_memory

Ten clients with a batch of 256 images each, ResNet-18, one thread, two rounds, each side in a process of its own. The
usual way is that of `benchmarks.reference_work`: a copy of every module and optimizer for each client, but one server
where there is one for all; clients one after the other. Printed is the most resident memory of either process (Linux,
macOS), with all that Python and torch take, which both have; the ratio is ours over theirs. Huge pages are off on both
sides: how many of them the kernel makes of small ones, some of which nobody uses, goes by the seconds that a process
runs.

Both sides keep freed memory for the next step, which is faster. A second measurement has both give it back at once:
what is left is in use. The two differ by the holes between what is in use, and on our side by what each thread keeps
for itself, of which there is one for the clients and one for the S-server. The third has plain layers on our side too:
what this package's keep for the backward pass, maps that are transformed for their products, is larger than the maps.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from benchmarks.reference_work import UsualWay, plain
from benchmarks.rounds import ALGORITHMS, Ours, config_for
from benchmarks.timing import CONSOLE, Goal, note
from fsl_sage.config import DataConfig
from fsl_sage.engines.process import peak_memory, prepare_process, prepare_small_process
from fsl_sage.experiment.setup import make_setup

CLIENTS, BATCH, ROUNDS = 10, 256, 2
KEPT, GIVEN_BACK = "kept", "given back"
OURS, OURS_PLAIN, USUAL = "ours", "ours with plain layers", "usual"


def play(algorithm: str, freed: str, side: str) -> int:
    """Play the rounds in this process, in which freed memory is KEPT or GIVEN_BACK; returns its peak in bytes."""
    prepare_process(threads=1)
    data = DataConfig(train_images=CLIENTS * BATCH, test_images=100)
    config = replace(config_for(algorithm, "resnet18", BATCH), clients=CLIENTS, data=data)
    setup = make_setup(config if side == OURS else plain(config))
    rounds = UsualWay(setup) if side == USUAL else Ours(setup)
    del setup  # the usual way does without its modules
    if freed == GIVEN_BACK:
        prepare_small_process(threads=1)
    for _ in range(ROUNDS):
        rounds.play()
    return peak_memory()


def peak(algorithm: str, freed: str, side: str) -> int:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.round_memory", algorithm, freed, side]
    small_pages = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    said = subprocess.run(command, env=small_pages, stdout=subprocess.PIPE, text=True, check=True).stdout
    return int(said.splitlines()[-1])


def compared(algorithm: str, freed: str, *sides: str) -> list[float]:
    """The peaks of these sides, each over the usual way's; told in words."""
    with ThreadPoolExecutor(2) as pool:  # it is memory that is measured, not time
        *ours, usual = pool.map(partial(peak, algorithm, freed), (*sides, USUAL))
    told = ", ".join(f"{side} {own / usual:.2f} ({own / 1e9:.2f} GB)" for side, own in zip(sides, ours, strict=True))
    line = f"  {algorithm:<12} freed memory {freed:<10}  {told}; the usual way {usual / 1e9:.2f} GB"
    CONSOLE.print(line, soft_wrap=True)
    return [own / usual for own in ours]


def main() -> None:
    """Print all sides of every algorithm."""
    CONSOLE.print("\n[bold]Peak memory of rounds over that of the usual way[/] (ten clients, batch 256; at most 1)")
    for algorithm in ALGORITHMS:
        (ratio,) = compared(algorithm, KEPT, OURS)
        in_use, with_plain_layers = compared(algorithm, GIVEN_BACK, OURS, OURS_PLAIN)
        note(f"peak memory of a round of {algorithm} over the usual way's", ratio, Goal(1))
        note(f"peak memory in use in a round of {algorithm} over the usual way's", in_use)
        note(f"the same of {algorithm} with plain layers on both sides", with_plain_layers)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(play(*sys.argv[1:]))
    else:
        main()

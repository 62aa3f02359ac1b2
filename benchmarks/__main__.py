"""`make bench`: all ratios, one after the other, and a table of them with their goals at the end."""

import sys
import time
import traceback

from benchmarks import (
    alignment,
    bf16,
    codecs,
    cut_memory,
    ray_engine,
    reference_work,
    resnet_step,
    round_memory,
    rounds,
    split_overhead,
    startup,
)
from benchmarks.timing import CONSOLE, summary

PARTS = (
    startup.main,
    bf16.main,
    resnet_step.main,
    split_overhead.main,
    cut_memory.main,
    round_memory.main,
    reference_work.main,
    rounds.main,
    rounds.fidelity,
    rounds.two_workers,
    alignment.main,
    codecs.main,
    ray_engine.main,
)


def main() -> int:
    """Measure everything. A part that fails is named, and the others go on; returns how many failed."""
    failed = []
    start = time.perf_counter()
    for part in PARTS:
        began = time.perf_counter()
        try:
            part()
        except Exception:
            traceback.print_exc()
            failed.append(f"{part.__module__}.{part.__name__}")
        CONSOLE.print(f"[dim]{part.__module__}: {time.perf_counter() - began:.0f} s[/]")
    summary(time.perf_counter() - start)
    if failed:
        CONSOLE.print(f"Failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(1, main()))

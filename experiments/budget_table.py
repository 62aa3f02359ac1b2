"""Prints what recorded runs reached within a budget: python experiments/budget_table.py FOLDER [--gib G] [--target A]

For each curve and algorithm below FOLDER: the best test accuracy of all rounds and of those within the budget, what a
run has moved, what it had moved when it reached the target, and a client's memory and FLOPs in a step. Runs that differ
in the seed only are one row, with means and standard deviations.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def row(name: str, runs: Sequence[Path], gib: float, target: float) -> str:
    """The row of runs that differ in the seed only."""
    found = [figures(run, gib, target) for run in runs]
    step = found[0]["step"]  # a step is measured in the first round
    known = "client_static_bytes" in step  # earlier versions did not measure it
    memory = (step["client_static_bytes"] + step["client_working_bytes"]) / 1e6 if known else None
    cells = [
        name,
        told([each["best"] for each in found], 1),
        told([each["moved"] for each in found], 3),
        told([each["within"] for each in found], 1),
        told([each["reached"] for each in found], 3, otherwise="not reached"),
        told([memory], 0),
        told([step["client_step_flops"] / 1e9 if known else None], 1),
    ]
    return f"| {' | '.join(cells)} |"


def figures(run: Path, gib: float, target: float) -> dict[str, Any]:
    """What one run directory says."""
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(100 * each["test_accuracy"], each["bytes_paper"] / 2**30) for each in rounds]
    return {
        "best": max(accuracy for accuracy, _ in points),
        "moved": points[-1][1],
        "within": max((accuracy for accuracy, moved in points if moved <= gib), default=None),
        "reached": next((moved for accuracy, moved in points if accuracy >= 100 * target), None),
        "step": rounds[0],
    }


def told(values: Sequence[float | None], digits: int, otherwise: str = "–") -> str:
    """The mean of values, with their standard deviation if there are several; of none if one is missing."""
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return otherwise
    spread = f" ± {statistics.stdev(there):.{digits}f}" if len(there) > 1 and statistics.stdev(there) else ""
    return f"{statistics.mean(there):.{digits}f}{spread}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=0.845)
    parser.add_argument("--target", type=float, default=0.45)
    asked = parser.parse_args()
    results = sorted(asked.folder.rglob("result.json"))
    if not results:
        parser.error(f"{asked.folder} has no finished runs: give a folder of experiments/results")
    within, to = f"best within {asked.gib:g} GiB", f"GiB to {100 * asked.target:g} %"
    print(f"| run | best | GiB | {within} | {to} | client MB | client GFLOPs |")
    print("|---|---|---|---|---|---|---|")
    groups: dict[str, list[Path]] = defaultdict(list)
    for result in results:
        run = result.parent
        groups[re.sub(r"_seed[0-9]+", "", str(run.relative_to(asked.folder)))].append(run)
    for name, runs in groups.items():
        print(row(name, runs, asked.gib, asked.target))


if __name__ == "__main__":
    main()

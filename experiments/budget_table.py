"""Prints what recorded runs reached within a budget: python experiments/budget_table.py FOLDER [--gib G] [--target A]

For each run below FOLDER, by curve and algorithm: the best test accuracy of all rounds and of those within the budget,
what the run has moved, what it had moved when it reached the target, and a client's memory and FLOPs in a step.
"""

import argparse
import json
from pathlib import Path


def row(run: Path, gib: float, target: float) -> str:
    """The row of one run directory."""
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(100 * each["test_accuracy"], each["bytes_paper"] / 2**30) for each in rounds]
    within = [accuracy for accuracy, moved in points if moved <= gib]
    reached = [moved for accuracy, moved in points if accuracy >= 100 * target]
    step = rounds[0]  # a step is measured in the first round
    memory = (step["client_static_bytes"] + step["client_working_bytes"]) / 1e6
    cells = [
        f"{run.parent.name}/{run.name}",
        f"{max(accuracy for accuracy, _ in points):.1f}",
        f"{points[-1][1]:.2f}",
        f"{max(within):.1f}" if within else "–",
        f"{reached[0]:.2f}" if reached else "not reached",
        f"{memory:.0f}",
        f"{step['client_step_flops'] / 1e9:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


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
    within, to = f"best within {asked.gib:g} GiB", f"GiB to {asked.target:.0%}"
    print(f"| run | best | GiB | {within} | {to} | client MB | client GFLOPs |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        print(row(result.parent, asked.gib, asked.target))


if __name__ == "__main__":
    main()

"""Prints what recorded runs reached within a budget: python experiments/budget_table.py FOLDER [--gib G] [--target A]

For each curve and algorithm below FOLDER: the best test accuracy of all rounds, of the last round, the mean of the last
five rounds and the best within the budget; what a run has moved, what it had moved when it reached the target; a
client's memory and FLOPs in a step; the least and the largest held-out cosine of estimated cut gradients in some spans
of rounds (`--spans 1-5 6-10`, rounds counted from 0). Runs that differ in the seed only are one row, with means and
standard deviations.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def row(name: str, runs: Sequence[Path], gib: float, target: float, spans: Sequence[str]) -> str:
    """The row of runs that differ in the seed only."""
    found = [figures(run, gib, target) for run in runs]
    step = found[0]["step"]  # a step is measured in the first round
    known = "client_static_bytes" in step  # earlier versions did not measure it
    memory = (step["client_static_bytes"] + step["client_working_bytes"]) / 1e6 if known else None
    cells = [
        name,
        told([each["best"] for each in found], 1),
        told([each["last"] for each in found], 1),
        told([each["last five"] for each in found], 1),
        told([each["moved"] for each in found], 3),
        told([each["within"] for each in found], 1),
        told([each["reached"] for each in found], 3, otherwise="not reached"),
        told([memory], 0),
        told([step["client_step_flops"] / 1e9 if known else None], 1),
        "; ".join(cosines([one["cosines"] for one in found], each) for each in spans),
    ]
    return f"| {' | '.join(cells)} |"


def figures(run: Path, gib: float, target: float) -> dict[str, Any]:
    """What one run directory says."""
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(100 * each["test_accuracy"], each["bytes_paper"] / 2**30) for each in rounds]
    return {
        "best": max(accuracy for accuracy, _ in points),
        "last": points[-1][0],
        "last five": statistics.mean(accuracy for accuracy, _ in points[-5:]),
        "moved": points[-1][1],
        "within": max((accuracy for accuracy, moved in points if moved <= gib), default=None),
        "reached": next((moved for accuracy, moved in points if accuracy >= 100 * target), None),
        "step": rounds[0],
        "cosines": [each.get("fidelity_cosine") for each in rounds],
    }


def span(text: str) -> str:
    """A span of rounds as it was given, if it is one."""
    if not re.fullmatch(r"\d+-\d+", text):
        raise argparse.ArgumentTypeError(f"{text} is not a span of rounds: give FIRST-LAST, such as 1-5")
    return text


def cosines(runs: Sequence[Sequence[float | None]], rounds: str) -> str:
    """The least and the largest held-out cosine of all runs in a span of rounds, such as 1-5."""
    first, last = map(int, rounds.split("-"))
    there = [cosine for run in runs for cosine in run[first : last + 1] if cosine is not None]
    return f"{min(there):.2f}-{max(there):.2f}" if there else "–"


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
    parser.add_argument("--spans", nargs="+", default=["1-5", "6-10", "11-14"], metavar="FIRST-LAST", type=span)
    asked = parser.parse_args()
    results = sorted(asked.folder.rglob("result.json"))
    if not results:
        parser.error(f"{asked.folder} has no finished runs: give a folder of experiments/results")
    within, to = f"best within {asked.gib:g} GiB", f"GiB to {100 * asked.target:g} %"
    cosine = f"cosine in rounds {'; '.join(asked.spans)}"
    print(f"| run | best | last | mean of last 5 | GiB | {within} | {to} | client MB | client GFLOPs | {cosine} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    groups: dict[str, list[Path]] = defaultdict(list)
    for result in results:
        run = result.parent
        groups[re.sub(r"_seed[0-9]+", "", str(run.relative_to(asked.folder)))].append(run)
    for name, runs in groups.items():
        print(row(name, runs, asked.gib, asked.target, asked.spans))


if __name__ == "__main__":
    main()

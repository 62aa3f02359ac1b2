"""Accuracy against processor time: python experiments/family_times.py experiments/results/family [--measure]

Runs that were recorded beside other work have times that cannot be compared. With --measure the first two rounds of
each run with iid clients are played again, one run after the other, with one worker and one thread, and the processor
seconds of each round are written to FOLDER/seconds.csv: of the round that aligns, if the algorithm does, and of one
that does not. Evaluation is left out. The figure accuracy-time in FOLDER/report/figures then has, for every recorded
round, the seconds that so many rounds take; a table of them is printed.
"""

import argparse
import csv
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes

from fsl_sage import run
from fsl_sage.algorithms.looks import algorithm_of
from fsl_sage.config import Config
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.trackers import Tracker
from fsl_sage.report.load import load_runs
from fsl_sage.report.metric import ACCURACY
from fsl_sage.report.panels import LOOK, by_setting, give_title, legend_of, line, log_if_far_apart, pages, save
from fsl_sage.report.study import Series, Setting, Study, make_study

TIMES = "seconds.csv"
TESTED = 250
"""Test images of a run that is timed: one batch."""


class Watch(Tracker):
    """Notes the processor time at the end of every round."""

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """The run begins, with everything built."""
        self.marks = [time.process_time()]

    def round(self, metrics: dict[str, Any]) -> None:
        """A round has ended."""
        self.marks.append(time.process_time())


def measure(folder: Path) -> None:
    """Play two rounds of each run with iid clients and write down what they took."""
    study = _study(folder)
    iid = next(setting for setting in study.settings if "iid" in setting.label)
    with open(folder / TIMES, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["algorithm", "seconds of a round that aligns", "seconds of another round"])
        for series in study.within(iid):
            config = RunDirectory(folder / series.runs[0].name).config()
            first, second = _rounds(config)
            rows.writerow([series.algorithm, f"{first:.2f}", f"{second:.2f}"])
            file.flush()
            print(f"{series.algorithm}: {first:.1f} s, then {second:.1f} s", flush=True)


def _rounds(config: Config) -> list[float]:
    """Processor seconds of the first two rounds of a run."""
    data = replace(config.data, test_images=TESTED, dir=None)
    with tempfile.TemporaryDirectory() as out:
        watch = Watch()
        short = replace(config, rounds=2, workers=1, checkpoint_every=9, data=data, out=Path(out) / "run")
        run(short, [watch])
    return list(np.diff(watch.marks))


def _study(folder: Path) -> Study:
    return make_study(load_runs(folder)[0])


def _elapsed(series: Series, times: dict[str, tuple[float, float]]) -> np.ndarray:
    """Seconds after each of the rounds of a series, [rounds]."""
    aligning, other = times[series.algorithm]
    aligned = np.array([bool(line.get("aligned")) for line in series.runs[0].metrics])
    return np.cumsum(np.where(aligned, aligning, other))


def _read(folder: Path) -> dict[str, tuple[float, float]]:
    with open(folder / TIMES) as file:
        next(rows := csv.reader(file))
        return {name: (float(first), float(second)) for name, first, second in rows}


def draw(folder: Path) -> None:
    """Draw the figure, and print a row for each algorithm."""
    study, times = _study(folder), _read(folder)

    def paint(axes: Axes, setting: Setting) -> None:
        ends = []
        for series in reversed(study.within(setting)):
            elapsed, curve = _elapsed(series, times), series.curve(ACCURACY)
            line(axes, series, elapsed, curve.mean, curve.std)
            ends.append(float(elapsed[-1]))
        axes.set(xlabel="processor time, seconds", ylabel=ACCURACY.axis)
        log_if_far_apart(axes, ends)

    with rc_context(LOOK):
        for drawing in pages("accuracy-time", "", by_setting(study), paint, legend=legend_of(study.algorithms)):
            give_title(drawing.figure, study.subject)
            save(drawing, folder / "report" / "figures")
    for row in _table(study, times):
        print(f"| {' | '.join(row)} |")


def _table(study: Study, times: dict[str, tuple[float, float]]) -> Iterator[list[str]]:
    yield ["algorithm", "seconds of a round", "of one that aligns"]
    yield ["---", "---:", "---:"]
    for algorithm in study.algorithms:
        aligning, other = times[algorithm]
        aligns = algorithm_of(algorithm).endswith("fsl-sage")
        yield [algorithm, f"{other:.1f}", f"{aligning:.1f}" if aligns else ""]


def main() -> None:
    """Measure if asked to, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--measure", action="store_true")
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.folder)
    elif not (asked.folder / TIMES).exists():
        parser.error(f"{asked.folder} has no {TIMES} yet: give --measure, which takes a quarter of an hour")
    draw(asked.folder)


if __name__ == "__main__":
    main()

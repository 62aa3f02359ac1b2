"""All curves of the study on fewer bytes in one figure: python experiments/fewer_bytes_figure.py [FOLDER]

Accuracy against GiB on one logarithmic axis, iid and skewed; shaded is a standard deviation over the seeds. It becomes
FOLDER/report/figures/accuracy-codecs.png. Printed is, for each seed, for how many times fewer bytes FSL-SAGE with
`small` and an upload at every step reaches the best accuracy of its uncoded run, to half a point.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fsl_sage.report.load import Run, load_runs
from fsl_sage.report.metric import ACCURACY
from fsl_sage.report.panels import LOOK, log_if_far_apart, pages, save
from fsl_sage.report.study import Series, Setting
from fsl_sage.report.style import style

FOLDER = Path(__file__).parent / "results" / "fewer-bytes"
PARTITIONS = {"iid": "iid", "alpha0.1": "Dirichlet 0.1"}
CURVES: dict[tuple[str, str], tuple[str, str, str]] = {
    ("small-every-step", "fsl-sage"): ("FSL-SAGE, small, every step", "#0072B2", "-"),
    ("small-every-second", "fsl-sage"): ("FSL-SAGE, small, every second step", "#009E73", "--"),
    ("small", "fsl-sage"): ("FSL-SAGE, small", "#0072B2", "--"),
    ("small-drift", "fsl-sage"): ("FSL-SAGE, small, when drifted", "#0072B2", ":"),
    ("balanced", "fsl-sage"): ("FSL-SAGE, balanced", "#56B4E9", "--"),
    ("plain", "fsl-sage"): ("FSL-SAGE", "#332288", "-"),
    ("others-small", "cse-fsl"): ("CSE-FSL, small", "#D55E00", "--"),
    ("others", "cse-fsl"): ("CSE-FSL", "#D55E00", "-"),
    ("others-small", "splitfed-ss"): ("SplitFed-SS, small", "#CC79A7", "--"),
    ("others", "splitfed-ss"): ("SplitFed-SS", "#CC79A7", "-"),
}
"""By curve and algorithm: a name, a colour and a line."""


NEAR = 0.005
"""Half a point."""


def saving(plain: Run, coded: Run) -> str:
    """For how many times fewer bytes a coded run reaches the best accuracy of an uncoded one, or how far it stays."""
    before, after = (run.values(ACCURACY.key) for run in (plain, coded))
    reached = np.flatnonzero(after >= before.max() - NEAR)
    if not len(reached):
        points = 100 * (before.max() - after.max())
        return f"{points:.1f} points below it for {plain.gib[-1] / coded.gib[-1]:.1f} times fewer bytes"
    return f"{plain.gib[before.argmax()] / coded.gib[reached[0]]:.1f} times fewer bytes"


def main(folder: Path) -> None:
    """Draw the figure."""
    runs, _ = load_runs(folder)
    by_name = {run.name: run for run in runs}
    for name, run in by_name.items():
        if name.startswith("plain/") and (coded := by_name.get(name.replace("plain/", "small-every-step/"))):
            print(f"{run.name.removeprefix('plain/')}: {saving(run, coded)}")
    there = [key for key in CURVES if any(run.name.startswith(f"{key[0]}/{key[1]}_") for run in runs)]

    def paint(axes: Axes, partition: str) -> None:
        ends = []
        for curve, algorithm in there:
            found = tuple(run for run in runs if run.name.startswith(f"{curve}/{algorithm}_{partition}_"))
            if not found:
                continue
            _, colour, dash = CURVES[curve, algorithm]
            drawn = Series(algorithm, Setting({}), found).curve(ACCURACY)
            axes.plot(drawn.gib, drawn.mean, color=colour, linestyle=dash, marker=style(algorithm).marker, markersize=3)
            axes.fill_between(drawn.gib, drawn.mean - drawn.std, drawn.mean + drawn.std, color=colour, alpha=0.15, lw=0)
            ends.append(float(drawn.gib[-1]))
        axes.set(xlabel="communication, GiB (the paper's convention)", ylabel=ACCURACY.axis)
        log_if_far_apart(axes, ends)

    legend = [
        Line2D([], [], color=colour, linestyle=dash, marker=style(algorithm).marker, markersize=3, label=name)
        for (_, algorithm), (name, colour, dash) in ((key, CURVES[key]) for key in there)
    ]
    with rc_context(LOOK):
        panels = [(title, partition) for partition, title in PARTITIONS.items()]
        for drawing in pages("accuracy-codecs", "", panels, paint, legend=legend):
            save(drawing, folder / "report" / "figures")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)

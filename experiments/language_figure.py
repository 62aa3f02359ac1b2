"""The curves of the studies on SmolLM2-135M in one figure: python experiments/language_figure.py

Test loss against MB, a panel for each cut, a line for each seed: that of the second seed is fainter. It becomes
loss-cuts.png in the figures of results/smollm2_e2e. Printed are the rows of the table in docs/language-models.md.
"""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fsl_sage.report.load import Run, load_runs
from fsl_sage.report.panels import LOOK, pages, save

RESULTS = Path(__file__).parent / "results"
CUTS = {"smollm2_e2e": "cut after block 1 of 30", "smollm2_e2e-block-10": "cut after block 10 of 30"}
CURVES = {
    "ridge/fsl-sage": ("FSL-SAGE, ridge", "#0072B2", "-", "o"),
    "control/fsl-sage": ("its control: clients stand still", "#555555", "--", "x"),
    "blocks/fsl-sage": ("FSL-SAGE, three blocks", "#56B4E9", "-", "o"),
    "cse-fsl/cse-fsl": ("CSE-FSL", "#D55E00", "-", "s"),
    "splitfed-ss/splitfed-ss": ("SplitFed-SS", "#CC79A7", "-", "v"),
    "blocks/fedavg": ("FedAvg", "#E69F00", "-", "P"),
}
"""By folder and algorithm: a name, a colour, a line and a marker."""
SAME = {"blocks/cse-fsl": "cse-fsl/cse-fsl", "blocks/splitfed-ss": "splitfed-ss/splitfed-ss"}
"""Recorded with the blocks, shown with the others of their kind."""


def curve_of(run: Run) -> str:
    """The curve that a run belongs to."""
    name = run.name.split("_")[0]
    return SAME.get(name, name)


def seed_of(run: Run) -> str:
    """By its name."""
    return run.name.rpartition("seed")[2]


def megabytes(run: Run) -> list[float]:
    """What had moved after each round, by the paper's convention."""
    return [line["bytes_paper"] / 1e6 for line in run.metrics]


def losses(run: Run) -> list[float]:
    """The test loss after each round."""
    return [line["test_loss"] for line in run.metrics]


def paint(axes: Axes, runs: list[Run]) -> None:
    """The curves of one cut."""
    for run in runs:
        _, colour, dash, marker = CURVES[curve_of(run)]
        look = {"color": colour, "linestyle": dash, "marker": marker, "alpha": 1 if seed_of(run) == "1" else 0.45}
        axes.plot(megabytes(run), losses(run), markersize=3, linewidth=1.3, **look)
    axes.set(xlabel="communication, MB (the paper's convention)", ylabel="test loss")


def main() -> None:
    """Draw the figure and print the table."""
    studies = {cut: load_runs(RESULTS / cut)[0] for cut in CUTS}
    legend = [
        Line2D([], [], color=colour, linestyle=dash, marker=marker, markersize=4, label=name)
        for name, colour, dash, marker in CURVES.values()
    ]
    with rc_context(LOOK):
        panels = [(title, studies[cut]) for cut, title in CUTS.items()]
        for drawing in pages("loss-cuts", "", panels, paint, legend=legend):
            save(drawing, RESULTS / "smollm2_e2e" / "report" / "figures")
    for cut, runs in studies.items():
        for run in sorted(runs, key=lambda run: (list(CURVES).index(curve_of(run)), run.name)):
            name, shown = CURVES[curve_of(run)][0], ", ".join(f"{loss:.3f}" for loss in losses(run))
            print(f"| {CUTS[cut]} | {name}, seed {seed_of(run)} | {shown} | {megabytes(run)[-1]:.0f} |")


if __name__ == "__main__":
    main()

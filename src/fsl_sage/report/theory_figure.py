"""The figure of a run beside the theory: what was measured round by round, and Theorem 1's bound."""

from pathlib import Path

from matplotlib.figure import Figure

from fsl_sage.records.figures import as_png, literal
from fsl_sage.records.files import write_bytes
from fsl_sage.report.theory import Theory


def theory_figure(path: Path, theory: Theory) -> None:
    """Squared gradients, estimation and cut error against rounds, on a logarithmic axis."""
    figure = Figure(figsize=(6.8, 4.2), layout="constrained")
    axes = figure.subplots()
    rounds = [line["round"] for line in theory.measured]

    def draw(values: list[float], label: str, colour: str, marker: str) -> None:
        axes.plot(rounds, values, color=colour, marker=marker, markersize=4, label=label)

    measured = theory.measured
    draw([line["client_gradient"] + line["server_gradient"] for line in measured], "|∇f|²", "#0072B2", "o")
    draw([line["client_gradient"] for line in measured], "|∇f|², client part", "#56B4E9", "s")
    draw([line["estimation_error"] for line in measured], "estimation error ε", "#D55E00", "D")
    right = theory.bounds[0].right
    if right is not None:
        axes.axhline(right, color="#444444", linestyle="--", label=f"Theorem 1, all {theory.rounds} rounds")
    axes.set(xlabel="round", ylabel="squared norm", yscale="log")
    title = (
        "Measured on probe batches"
        if right is not None
        else "Measured on probe batches; the step sizes are too large for a bound"
    )
    axes.set_title(literal(title), fontsize="medium")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    write_bytes(path, as_png(figure))

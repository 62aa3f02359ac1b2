"""The cuts of a model as a figure."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fsl_sage.config import Config
from fsl_sage.experiment.cuts import CutCosts, Limits, best
from fsl_sage.records.files import write_bytes
from fsl_sage.report.style import style


def cuts_figure(path: Path, config: Config, table: Sequence[CutCosts], limits: Limits) -> None:
    """What a cut costs, from the first to the last: memory and FLOPs of the client above, bytes of a round below."""
    figure = Figure(figsize=(min(max(8, 3 + 0.22 * len(table)), 24), 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_client(above, table, limits)
    _draw_bytes(below, table)
    chosen = best(table, limits, config.algorithm)
    if chosen is not None:
        place = table.index(chosen)
        for axes in (above, below):
            axes.axvline(place, color="#333333", linestyle=":", zorder=0)
        side = "left" if place < len(table) / 2 else "right"
        note = f" recommended: {chosen.point.name} "
        below.annotate(note, (place, 1), xycoords=("data", "axes fraction"), ha=side, va="bottom", fontsize="small")
    figure.suptitle(
        f"Where to cut {config.model.name} on {config.data.name} for {config.algorithm} "
        f"(a step has {config.batch_size} samples, a round {config.clients} clients)"
    )
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_bytes(path, image.getvalue())


def _draw_client(axes: Axes, table: Sequence[CutCosts], limits: Limits) -> None:
    """Memory as bars, FLOPs as a line; a cut that does not fit the limits is pale."""
    colours = ["#E3E3E3" if row.obstacles(limits) else "#9CB4CC" for row in table]
    axes.bar(range(len(table)), [row.client.memory / 1e6 if row.client else 0 for row in table], color=colours)
    axes.set_ylabel("client's memory, MB")
    if limits.client_memory is not None:
        _draw_limit(axes, limits.client_memory / 1e6, "limit of memory", "#5B7FA3", "left")
    if "#E3E3E3" in colours:
        axes.set_title("pale: does not fit the limits", loc="left", fontsize="small")
    flops = axes.twinx()
    operations = [row.client.step_flops / 1e9 if row.client else float("nan") for row in table]
    flops.plot(operations, color="#333333", marker="o", markersize=4)
    flops.set_ylabel("client's FLOPs, 10⁹ (line)")
    flops.set_ylim(bottom=0)
    if limits.client_flops is not None:
        _draw_limit(flops, limits.client_flops / 1e9, "limit of FLOPs", "#333333", "right")


def _draw_limit(axes: Axes, value: float, name: str, colour: str, side: Literal["left", "right"]) -> None:
    """A line across, with its name at one end; the axis reaches to it."""
    axes.axhline(value, color=colour, linestyle="--", linewidth=1)
    axes.set_ylim(0, max(axes.get_ylim()[1], value * 1.1))
    place = (0.01 if side == "left" else 0.99, value)
    where = ("axes fraction", "data")
    axes.annotate(name, place, xycoords=where, ha=side, va="bottom", fontsize="small", color=colour)


def _draw_bytes(axes: Axes, table: Sequence[CutCosts]) -> None:
    """One line for each algorithm, and one for all that move the same bytes."""
    lines: dict[tuple[int | None, ...], list[str]] = {}
    for algorithm in table[0].round_bytes:
        lines.setdefault(tuple(row.round_bytes[algorithm] for row in table), []).append(algorithm)
    for values, algorithms in lines.items():
        moved = [float("nan") if value is None else value / 1e6 for value in values]
        label, colour = ", ".join(algorithms), style(algorithms[0]).colour
        axes.plot(moved, color=colour, marker="o", markersize=4, label=label)
    axes.set(ylabel="bytes of a round, MB", yscale="log", xticks=range(len(table)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    names = [row.point.name for row in table]
    axes.set_xticklabels(names, rotation=90, fontsize="small" if len(table) < 80 else "xx-small")
    axes.grid(alpha=0.3)
    # The lines fill the panel: below it nothing is in the way.
    axes.figure.legend(loc="outside lower center", frameon=False, fontsize="small", ncols=2)

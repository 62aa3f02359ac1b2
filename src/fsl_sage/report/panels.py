"""The panels of a report's figures: their look, their place on a page, their lines; drawn with matplotlib."""

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, LogLocator, NullLocator

from fsl_sage.records.figures import literal
from fsl_sage.records.files import write_bytes
from fsl_sage.report.study import Series, Setting, Study
from fsl_sage.report.style import style

PANELS = 6
"""Panels of a figure; more settings make more figures."""

LOOK: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": "#222222",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "pdf.fonttype": 42,
}


class Drawing(NamedTuple):
    """A figure with its file's name and a caption."""

    name: str
    caption: str
    figure: Figure


Painter = Callable[[Axes, Any], None]


def by_setting(study: Study) -> list[tuple[str, Setting]]:
    """A panel for each setting: its title and what is painted in it."""
    return [(setting.label, setting) for setting in study.settings]


def save(drawing: Drawing, folder: Path) -> bytes:
    """Write PNG and PDF; returns the PNG."""
    contents = {kind: _drawn(drawing.figure, kind) for kind in ("png", "pdf")}
    for kind, content in contents.items():
        write_bytes(folder / f"{drawing.name}.{kind}", content)
    return contents["png"]


def _drawn(figure: Figure, kind: str) -> bytes:
    file = BytesIO()
    # Without the date the same data give the same file.
    metadata = {"CreationDate": None} if kind == "pdf" else None
    with matplotlib.rc_context(LOOK):
        figure.savefig(file, format=kind, dpi=200, metadata=metadata)
    return file.getvalue()


def pages(
    name: str,
    caption: str,
    panels: Sequence[tuple[str, Any]],
    paint: Painter,
    *,
    legend: Sequence[Any] = (),
    wide: float = 1,
) -> Iterator[Drawing]:
    """Figures with up to PANELS panels each, every one a (title, content) that `paint` draws."""
    for page, start in enumerate(range(0, len(panels), PANELS)):
        part = panels[start : start + PANELS]
        columns = 1 if len(part) == 1 else 2 if len(part) in (2, 4) else 3
        rows = math.ceil(len(part) / columns)
        width, height = (6.4, 4.2) if len(part) == 1 else (4.4, 3.4)
        figure = Figure(figsize=(columns * width * wide, rows * height + 0.4), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # type: ignore[union-attr, call-arg]
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (title, content) in zip(grid, part, strict=False):
            paint(axes, content)
            axes.set_title(literal(_in_lines(title, width * wide)))
        for axes in grid[len(part) :]:
            axes.set_axis_off()
        if legend:
            names = [str(handle.get_label()) for handle in legend]
            ncols = _columns(names, figure.get_figwidth())
            figure.legend(handles=list(legend), loc="outside upper center", ncols=ncols)
        yield Drawing(name if page == 0 else f"{name}-{page + 1}", caption, figure)


def give_title(figure: Figure, title: str) -> None:
    """Put a title above the legend; matplotlib draws a figure's own title and a legend outside over one another."""
    if figure.legends:
        figure.legends[0].set_title(literal(title), prop=FontProperties(size=11))
    else:
        figure.suptitle(literal(title), fontsize=11)


_BOLD_LETTER, _LINES = 0.1, 3
"""Inches that a letter of a panel's title takes, and the lines that it may have."""


def _in_lines(title: str, width: float) -> str:
    """A title that fits into so many inches. Settings that differ in many options have all of them in the tables."""
    return textwrap.fill(title, int(width / _BOLD_LETTER), max_lines=_LINES, placeholder=" …")


_HANDLE, _LETTER = 0.7, 0.08
"""Inches that an entry of a legend takes: its line with the space around it, and a letter of its name."""


def _columns(names: Sequence[str], width: float) -> int:
    """As many columns of a legend as fit into so many inches, evenly filled."""
    for columns in range(len(names), 1, -1):
        rows, longer = divmod(len(names), columns)  # the first columns have one row more
        starts = [place * rows + min(place, longer) for place in range(columns + 1)]
        longest = [max(map(len, names[start:end])) for start, end in pairwise(starts)]
        if columns * _HANDLE + sum(longest) * _LETTER <= width:
            return math.ceil(len(names) / math.ceil(len(names) / columns))
    return 1


def legend_of(algorithms: Sequence[str]) -> list[Line2D]:
    """An entry of a legend for each algorithm, in its colour, line and marker."""
    looks = [style(algorithm) for algorithm in algorithms]
    return [
        Line2D([], [], color=look.colour, linestyle=look.line, marker=look.marker, label=look.name) for look in looks
    ]


def line(axes: Axes, series: Series, x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> None:
    """Draw the mean of a series, and a band of one standard deviation if it has several runs; arrays [points]."""
    look = style(series.algorithm)
    every = max(1, len(x) // 12)
    axes.plot(x, mean, color=look.colour, linestyle=look.line, marker=look.marker, markersize=4, markevery=every)
    if len(series.runs) > 1:
        axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.15, linewidth=0)


def log_if_needed(axes: Axes) -> None:
    """Use a logarithmic y-axis where one curve is so high that it would flatten all others."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()] or [np.ones(1)])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) and values.max() > 20 * np.median(values):
        axes.set_yscale("log")
        plain_numbers(axes)


def log_if_far_apart(axes: Axes, ends: Sequence[float]) -> None:
    """Use a logarithmic x-axis where one curve is so long that it would press the others against the left edge."""
    if ends and max(ends) > 4 * min(ends) > 0:
        axes.set_xscale("log")
        # Two labels alone, such as 100 and 200, would look like a linear axis.
        steps = (1, 2, 5) if max(ends) > 10 * min(ends) else (1, 1.5, 2, 3, 5, 7)
        axes.xaxis.set_major_locator(LogLocator(subs=steps))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(left=0)


def plain_numbers(axes: Axes) -> None:
    """Label a logarithmic axis with plain numbers such as 20 and 200, not with powers of ten."""
    axes.yaxis.set_major_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))

"""The two figures of every run: the headline score against communication, and the classes that each client holds."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from fsl_sage.config import Config, flatten, to_dict
from fsl_sage.problems.score import Score
from fsl_sage.records.files import write_bytes
from fsl_sage.records.subject import subject
from fsl_sage.wire.ledger import GIB


def literal(text: str) -> str:
    """A name that comes from the data, for a figure: matplotlib would take what is between two $ for a formula."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text).replace(
        "$", r"\$"
    )


def score_figure(path: Path, metrics: Sequence[dict[str, Any]], score: Score, config: Config, colour: str) -> None:
    """The headline score against GiB moved, with the rounds that aligned marked."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    gib = [line["bytes_paper"] / GIB for line in metrics]
    values = [(100 if score.percent else 1) * line[score.name] for line in metrics]
    axes.plot(gib, values, color=colour, marker="o", markersize=3, label=config.algorithm)
    aligned = [place for place, line in enumerate(metrics) if line["aligned"]]
    if aligned:
        points = ([gib[place] for place in aligned], [values[place] for place in aligned])
        axes.plot(*points, "D", color=colour, markerfacecolor="white", markersize=7, label="round that aligns")
    axes.set(
        xlabel="communication, GiB (the paper's convention)",
        ylabel=f"{score.title}, %" if score.percent else score.title,
    )
    axes.set_xlim(left=0)
    axes.set_title(literal(subject([flatten(to_dict(config))])), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right" if score.higher_is_better else "upper right")
    _save(figure, path)


MOST_BARS = 60
"""Clients that have bars of their own. Beyond, gaps between them would not be seen, and bars by the thousand take
seconds to draw."""


def classes_figure(path: Path, counts: np.ndarray, classes: Sequence[str], config: Config) -> None:
    """The class-label distribution: a bar for each client, a colour for each class. `counts` is [clients, classes]."""
    clients = len(counts)
    figure = Figure(figsize=(7, min(12.0, 1.2 + 0.32 * clients)), layout="constrained")
    axes = figure.subplots()
    shades = colormaps["tab20"](np.linspace(0, 1, 20))
    left = np.zeros(clients)
    for label, name in enumerate(classes):
        right = left + counts[:, label]
        look = {"color": shades[label % 20], "label": literal(name)}
        if clients <= MOST_BARS:
            axes.barh(np.arange(clients), right - left, left=left, height=0.8, **look)
        else:
            edges = np.arange(clients + 1) - 0.5
            axes.stairs(right, edges, baseline=left, orientation="horizontal", fill=True, **look)
        left = right
    axes.set(xlabel="training examples", ylabel="client", ylim=(clients - 0.4, -0.6))
    axes.set_title(literal(subject([flatten(to_dict(config))], of_model=False)), fontsize="medium")
    # A row has room for its number while the figure grows with the clients, and a little longer.
    axes.yaxis.set_major_locator(FixedLocator(range(clients)) if clients <= MOST_BARS else MaxNLocator(integer=True))
    if clients > 33:
        axes.tick_params(axis="y", labelsize="x-small")
    if len(classes) <= 20:
        figure.legend(loc="outside right upper", frameon=False, fontsize="small", title="class")
    _save(figure, path)


def as_png(figure: Figure) -> bytes:
    """The picture as a file."""
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()


def _save(figure: Figure, path: Path) -> None:
    write_bytes(path, as_png(figure))

"""The figures of a report, drawn with matplotlib: one panel for each setting, one look for each algorithm."""

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fsl_sage.records.figures import literal
from fsl_sage.report.metric import NMSE, Metric
from fsl_sage.report.options import HETEROGENEITY, dirichlet_alpha, heterogeneity
from fsl_sage.report.panels import (
    LOOK,
    Drawing,
    by_setting,
    give_title,
    legend_of,
    line,
    log_if_far_apart,
    log_if_needed,
    pages,
    plain_numbers,
)
from fsl_sage.report.score_figures import (
    GIB_AXIS,
    ablation,
    best_against_alpha,
    score_against_communication,
    score_against_step,
)
from fsl_sage.report.study import Setting, Study
from fsl_sage.report.style import style, value_name

WHOLE_AXIS = "communication, GiB (whole models, frozen weights too)"


def draw_figures(study: Study, bandwidth: float) -> list[Drawing]:
    """Every figure for which there are data."""
    with matplotlib.rc_context(LOOK):
        curves = [_curves(study, metric) for metric in study.curves]
        fidelity = [_fidelity(study, metric) for metric in study.fidelities]
        ablations = [ablation(study, path) for path in study.varying if path not in _NO_ABLATION]
        heterogeneity_ = [best_against_alpha(study), score_against_communication(study), score_against_step(study)]
        rest = [_classes(study), *ablations, _latency(study, bandwidth)]
        drawings = list(itertools.chain(*curves, *heterogeneity_, *fidelity, *rest))
        for drawing in drawings:
            give_title(drawing.figure, study.subject)
        return drawings


_NO_ABLATION = (HETEROGENEITY, "data.name", "model.name")


# Curves


def _curves(study: Study, metric: Metric) -> Iterator[Drawing]:
    whole = [("whole_gib", WHOLE_AXIS)] if study.has_frozen_weights else []
    for axis, label in (("gib", GIB_AXIS), *whole, ("rounds", "rounds")):

        def paint(axes: Axes, setting: Setting, axis: str = axis, label: str = label) -> None:
            ends = []
            for series in reversed(study.within(setting)):
                if series.has(metric):
                    curve = series.curve(metric)
                    line(axes, series, getattr(curve, axis), curve.mean, curve.std)
                    ends.append(float(getattr(curve, axis)[-1]))
            axes.set(xlabel=label, ylabel=metric.axis)
            log_if_far_apart(axes, ends)
            if axis == "rounds":
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if not metric.higher_is_better:
                log_if_needed(axes)

        against = {"gib": "communication", "whole_gib": "communication with models sent whole"}.get(axis, axis)
        caption = f"{metric.label.capitalize()} against {against}: mean over the seeds, shaded one standard deviation"
        name = f"{metric.file_name}-{axis.replace('_', '-')}"
        yield from pages(name, caption, by_setting(study), paint, legend=legend_of(study.algorithms))


# Fidelity


def _fidelity(study: Study, metric: Metric) -> Iterator[Drawing]:
    after = Metric(f"{metric.key}_seen", metric.label)
    measured = [series.algorithm for series in study.series if series.has(metric)]
    panels = [
        (setting.label, setting)
        for setting in study.settings
        if any(series.has(metric) for series in study.within(setting))
    ]

    def paint(axes: Axes, setting: Setting) -> None:
        for series in reversed(study.within(setting)):
            if not series.has(metric):
                continue
            curve, look = series.curve(metric), style(series.algorithm)
            line(axes, series, curve.rounds, curve.mean, curve.std)
            if series.has(after):
                aligned = series.curve(after).mean
                axes.plot(
                    curve.rounds,
                    aligned,
                    "D",
                    color=look.colour,
                    markerfacecolor="white",
                    markersize=7,
                    markeredgewidth=1.5,
                )
        axes.set(xlabel="rounds", ylabel=textwrap.fill(metric.label, 28))
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if metric is NMSE:
            log_if_needed(axes)

    legend = legend_of([algorithm for algorithm in study.algorithms if algorithm in measured])
    if any(series.has(after) for series in study.series):
        legend.append(
            Line2D(
                [],
                [],
                linestyle="",
                marker="D",
                markerfacecolor="white",
                color="#555555",
                label="right after alignment, on seen uploads",
            )
        )
    caption = (
        f"Gradient fidelity: {metric.label} at the S-server after every round, on the newest uploads; "
        "hollow diamonds: right after an alignment, on the uploads that it has seen"
    )
    yield from pages(metric.key.replace("_", "-"), caption, panels, paint, legend=legend)


# Class labels


def _classes(study: Study) -> Iterator[Drawing]:
    found: dict[tuple[str, str], Any] = {}
    for run in study.runs:
        if run.classes is not None:
            key = (run.options["data.name"], heterogeneity(run.options))
            found.setdefault(key, (run.classes, run.seed))
    order = sorted(found, key=lambda key: (key[0], -(dirichlet_alpha(key[1]) or 0)))
    several = len({name for name, _ in order}) > 1
    panels = [
        (
            f"{key[0] + ', ' if several else ''}{value_name(HETEROGENEITY, key[1])}, seed {found[key][1]}",
            (key[0], found[key][0]),
        )
        for key in order
    ]

    def paint(axes: Axes, content: tuple[str, tuple[np.ndarray, list[str]]]) -> None:
        data, (counts, names) = content
        most = max(other.max() for name, (other, _) in (panel[1] for panel in panels) if name == data)
        image = axes.imshow(counts, cmap="Blues", aspect="auto", vmin=0, vmax=most)
        axes.grid(visible=False)
        axes.set(xlabel="class", ylabel="client")
        if len(counts) <= 30:
            axes.set_yticks(range(len(counts)), map(str, range(len(counts))), fontsize=8 if len(counts) <= 20 else 6)
        else:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        if len(names) <= 20:
            axes.set_xticks(range(len(names)), map(literal, names), rotation=45, ha="right", fontsize=8)
        if counts.size <= 200:
            for (client, label), count in np.ndenumerate(counts):
                dark = count > 0.6 * most
                axes.text(
                    label,
                    client,
                    str(count or ""),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if dark else "#333",
                )
        axes.figure.colorbar(image, ax=axes, label="training examples")

    yield from pages("classes", "Class-label distribution: training examples by client and class", panels, paint)


# Latency


def _latency(study: Study, bandwidth: float) -> Iterator[Drawing]:
    panels = []
    for rest, members in study.grouped(HETEROGENEITY):
        rounds = min(series.rounds for setting in members for series in study.within(setting))
        panels.append((", ".join([*([rest.label] if rest.label else []), f"{rounds} rounds"]), (members, rounds)))

    def paint(axes: Axes, content: tuple[Sequence[Setting], int]) -> None:
        members, rounds = content
        bars = []
        for algorithm in study.algorithms:
            series = [each for each in (study.of(algorithm, setting) for setting in members) if each]
            if series:
                computation = float(np.mean([each.computation_seconds(rounds) for each in series]))
                communication = float(np.mean([each.communication_seconds(rounds, bandwidth) for each in series]))
                bars.append((algorithm, computation, communication))
        for place, (algorithm, *seconds) in enumerate(bars):
            colour = style(algorithm).colour
            looks: Any = ({"color": colour}, {"facecolor": colour + "55", "hatch": "///", "edgecolor": colour})
            for offset, height, look in zip((-0.2, 0.2), seconds, looks, strict=True):
                axes.bar_label(axes.bar(place + offset, height, 0.37, **look), fmt="%.3g", fontsize=8, color="#444444")
        axes.set(yscale="log", ylabel="seconds", xlim=(-0.6, max(len(bars), 3) - 0.4))
        axes.set_ylim(0.5 * min(min(bar[1:]) for bar in bars), 1.6 * max(max(bar[1:]) for bar in bars))
        axes.set_xticks(range(len(bars)), [style(bar[0]).name.replace(" ", "\n") for bar in bars], fontsize=9)
        plain_numbers(axes)
        axes.grid(visible=False, axis="x")

    legend = [
        Patch(color="#555555", label="computation, measured"),
        Patch(facecolor="#cccccc", edgecolor="#555555", hatch="///", label=f"communication at {bandwidth:g} Mbit/s"),
    ]
    caption = (
        "Latency. Computation: wall time of the simulation on the machine that ran it, all clients and evaluation, "
        "of each round the median over seeds. "
        f"Communication: in each round the busiest client's bytes up and down at {bandwidth:g} Mbit/s, "
        "clients in parallel"
    )
    yield from pages("latency", caption, panels, paint, legend=legend, wide=1.15)

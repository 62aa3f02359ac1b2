"""The figures of a report, drawn with matplotlib: one panel for each setting, one look for each algorithm."""

import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from fsl_sage.records.figures import literal
from fsl_sage.report.options import HETEROGENEITY, concerns, dirichlet_alpha, heterogeneity
from fsl_sage.report.panels import (
    LOOK,
    Drawing,
    give_title,
    legend_of,
    line,
    log_if_far_apart,
    log_if_needed,
    pages,
    plain_numbers,
)
from fsl_sage.report.study import NMSE, Metric, Series, Setting, Study
from fsl_sage.report.style import option_axis, option_name, style, value_name, value_text
from fsl_sage.units import bytes_text

GIB_AXIS = "communication, GiB (the paper's convention)"
WHOLE_AXIS = "communication, GiB (whole models, frozen weights too)"


def draw_figures(study: Study, bandwidth: float) -> list[Drawing]:
    """Every figure for which there are data."""
    with matplotlib.rc_context(LOOK):
        curves = [_curves(study, metric) for metric in study.curves]
        fidelity = [_fidelity(study, metric) for metric in study.fidelities]
        ablations = [_ablation(study, path) for path in study.varying if path not in _NO_ABLATION]
        heterogeneity_ = [_best_against_alpha(study), _score_against_communication(study), _score_against_step(study)]
        rest = [_classes(study), *ablations, _latency(study, bandwidth)]
        drawings = list(itertools.chain(*curves, *heterogeneity_, *fidelity, *rest))
        for drawing in drawings:
            give_title(drawing.figure, study.subject)
        return drawings


_NO_ABLATION = (HETEROGENEITY, "data.name", "model.name")


def _by_setting(study: Study) -> list[tuple[str, Setting]]:
    return [(setting.label, setting) for setting in study.settings]


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
        yield from pages(name, caption, _by_setting(study), paint, legend=legend_of(study.algorithms))


# Heterogeneity


def _best_against_alpha(study: Study) -> Iterator[Drawing]:
    metric = study.main_metric
    panels = []
    for rest, members in study.grouped(HETEROGENEITY):
        known = [(_alpha(setting), setting) for setting in members if _alpha(setting) is not None]
        if len(known) > 1:
            panels.append((rest.label, sorted(known, key=lambda pair: pair[0] or 0)))

    def paint(axes: Axes, known: Sequence[tuple[float, Setting]]) -> None:
        finite = [alpha for alpha, _ in known if math.isfinite(alpha)]
        end = max(finite) * 10  # iid is the limit of large alpha: it stands at the right, with a place of its own
        places = {alpha: alpha if math.isfinite(alpha) else end for alpha, _ in known}
        for algorithm in reversed(study.algorithms):
            look = style(algorithm)
            points = []
            for alpha, setting in known:
                series = study.of(algorithm, setting)
                best = series.best(metric) if series else None
                if best:
                    points.append((places[alpha], best.mean, best.std))
            if points:
                x, mean, std = np.array(points).T
                axes.errorbar(
                    x, mean, std, color=look.colour, linestyle=look.line, marker=look.marker, markersize=5, capsize=3
                )
        axes.set(xscale="log", xlabel="Dirichlet α (left: heterogeneous)", ylabel=f"best {metric.axis}")
        axes.xaxis.set_major_locator(FixedLocator(list(places.values())))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{alpha:g}" if math.isfinite(alpha) else "iid" for alpha in places])

    caption = f"Best {metric.label} against the Dirichlet parameter; bars are one standard deviation over the seeds"
    yield from pages("best-against-alpha", caption, panels, paint, legend=legend_of(study.algorithms))


def _alpha(setting: Setting) -> float | None:
    return dirichlet_alpha(setting.values[HETEROGENEITY]) if HETEROGENEITY in setting.values else None


def _score_against_communication(study: Study) -> Iterator[Drawing]:
    metric = study.main_metric
    panels = [(rest.label, members) for rest, members in study.grouped(HETEROGENEITY)]
    if len(study.series) < 2:
        return
    levels = sorted({_level(setting) for setting in study.settings}, reverse=True)

    def area(setting: Setting) -> float:
        """Sizes of markers in equal steps; the more heterogeneous, the larger."""
        return 45 + 70 * levels.index(_level(setting))

    def paint(axes: Axes, members: Sequence[Setting]) -> None:
        for setting in members:
            for series in study.within(setting):
                best = series.best(metric)
                if best:
                    look = style(series.algorithm)
                    x = series.gib_of_best(metric)
                    axes.scatter(
                        x,
                        best.mean,
                        s=area(setting),
                        color=look.colour,
                        marker=look.marker,
                        alpha=0.75,
                        edgecolor="white",
                    )
        axes.set(xlabel=f"{GIB_AXIS} at the best round", ylabel=f"best {metric.axis}")
        axes.set_xlim(left=0)
        axes.margins(0.12)

    looks = [style(algorithm) for algorithm in study.algorithms]
    legend = [Line2D([], [], linestyle="", color=look.colour, marker=look.marker, label=look.name) for look in looks]
    if len(levels) > 1:
        sizes = {setting.values.get(HETEROGENEITY): area(setting) for setting in study.settings}
        legend += [
            Line2D([], [], linestyle="", color="#999999", marker="o", markersize=math.sqrt(size), label=_name(level))
            for level, size in sizes.items()
        ]
    corner = "north-west" if metric.higher_is_better else "south-west"
    caption = (
        f"Best {metric.label} and the communication it took, mean over the seeds: {corner} is best; "
        "the larger the marker, the more heterogeneous the clients"
    )
    yield from pages(f"{metric.file_name}-communication", caption, panels, paint, legend=legend)


def _level(setting: Setting) -> float:
    if HETEROGENEITY not in setting.values:
        return math.inf
    alpha = _alpha(setting)
    return 0.0 if alpha is None else alpha  # shards and restaurants: as heterogeneous as can be


def _name(level: Any) -> str:
    return value_name(HETEROGENEITY, level) if level is not None else ""


# What a client's step takes


def _score_against_step(study: Study) -> Iterator[Drawing]:
    """The best score against a client's memory, and against its floating-point operations."""
    metric = study.main_metric
    known = [series for series in study.series if series.step_memory("client") is not None]
    if len({series.algorithm for series in known}) < 2:
        return
    axes_of: dict[str, tuple[str, Callable[[Series], float]]] = {
        "client-memory": ("client's memory in a step, MB", lambda series: (series.step_memory("client") or 0) / 1e6),
        "client-flops": ("client's FLOPs in a step, 10⁹", lambda series: (series.step("client_step_flops") or 0) / 1e9),
    }
    looks = [style(algorithm) for algorithm in study.algorithms]
    legend = [Line2D([], [], linestyle="", color=look.colour, marker=look.marker, label=look.name) for look in looks]
    corner = "north-west" if metric.higher_is_better else "south-west"
    for name, (label, read) in axes_of.items():

        def paint(axes: Axes, setting: Setting, label: str = label, read: Callable[[Series], float] = read) -> None:
            places = []
            for series in study.within(setting):
                best = series.best(metric)
                if best and series in known:
                    look = style(series.algorithm)
                    places.append(read(series))
                    axes.errorbar(
                        places[-1],
                        best.mean,
                        best.std if best.seeds > 1 else None,
                        color=look.colour,
                        marker=look.marker,
                        markersize=9,
                        markeredgecolor="white",
                        capsize=3,
                    )
            axes.set(xlabel=label, ylabel=f"best {metric.axis}")
            log_if_far_apart(axes, places)
            axes.margins(0.12)

        what = "the memory" if name == "client-memory" else "the floating-point operations"
        caption = (
            f"Best {metric.label} against {what} of a client's step, mean over the seeds: {corner} is best; "
            "bars are one standard deviation"
        )
        yield from pages(f"{metric.file_name}-{name}", caption, _by_setting(study), paint, legend=legend)


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
        (f"{key[0] + ', ' if several else ''}{_name(key[1])}, seed {found[key][1]}", (key[0], found[key][0]))
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


# Ablations


def _ablation(study: Study, path: str) -> Iterator[Drawing]:
    metric = study.main_metric
    panels = [(rest.label, members) for rest, members in study.grouped(path) if len(members) > 1]

    def paint(axes: Axes, members: Sequence[Setting]) -> None:
        values = [setting.values[path] for setting in members]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        places = np.array(values if numeric else range(len(values)), dtype=float)
        joined = numeric or path == "model.auxiliary"  # which stands in the order of its size
        for algorithm in reversed(study.algorithms):
            series = [study.of(algorithm, setting) for setting in members]
            if concerns(algorithm, path):
                _final_and_best(axes, algorithm, _points(places, series, metric), joined=joined)
            else:
                _baseline(axes, series[0], metric)
        axes.set(xlabel=option_axis(path), ylabel=metric.axis)
        axes.set_xticks(places, [literal(_value_label(study, path, setting)) for setting in members])
        axes.margins(x=0.08)

    legend = legend_of(study.algorithms)
    legend += [Line2D([], [], color="#555555", linestyle="", marker="_", markersize=12, label="best of any round")]
    caption = f"Effect of {option_name(path)}: final {metric.label} and, as dashes, the best of any round"
    yield from pages(f"ablation-{option_name(path).replace(' ', '-')}", caption, panels, paint, legend=legend)


def _value_label(study: Study, path: str, setting: Setting) -> str:
    text = value_text(path, setting.values[path])
    sizes = [run.auxiliary_bytes for series in study.within(setting) for run in series.runs if run.auxiliary_bytes]
    return f"{text}\n{bytes_text(sizes[0])}" if path == "model.auxiliary" and sizes else text


def _points(places: np.ndarray, series: Sequence[Series | None], metric: Metric) -> np.ndarray:
    """[4, n] places, final, its deviation, best."""
    rows = []
    for place, each in zip(places, series, strict=True):
        final, best = (each.final(metric), each.best(metric)) if each else (None, None)
        if final and best:
            rows.append((place, final.mean, final.std, best.mean))
    return np.array(rows).reshape(-1, 4).T


def _final_and_best(axes: Axes, algorithm: str, points: np.ndarray, *, joined: bool) -> None:
    look = style(algorithm)
    x, final, std, best = points
    line = look.line if joined else ""
    axes.errorbar(x, final, std, color=look.colour, linestyle=line, marker=look.marker, markersize=6, capsize=3)
    axes.plot(x, best, "_", color=look.colour, markersize=14, markeredgewidth=2)


def _baseline(axes: Axes, series: Series | None, metric: Metric) -> None:
    final = series.final(metric) if series else None
    if series and final:
        look = style(series.algorithm)
        axes.axhline(final.mean, color=look.colour, linestyle=look.line, linewidth=1.4)


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

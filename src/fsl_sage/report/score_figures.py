"""Figures of scores: against heterogeneity, communication, what a client's step takes, and an option that varies."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from fsl_sage.algorithms.looks import algorithm_of
from fsl_sage.records.figures import literal
from fsl_sage.report.metric import Metric
from fsl_sage.report.options import HETEROGENEITY, concerns, dirichlet_alpha
from fsl_sage.report.panels import Drawing, by_setting, legend_of, log_if_far_apart, pages
from fsl_sage.report.study import Series, Setting, Study
from fsl_sage.report.style import option_axis, option_name, style, value_name, value_text
from fsl_sage.units import bytes_text

GIB_AXIS = "communication, GiB (the paper's convention)"


def best_against_alpha(study: Study) -> Iterator[Drawing]:
    """The best score against the Dirichlet parameter, where it varies."""
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


def score_against_communication(study: Study) -> Iterator[Drawing]:
    """The best score against the bytes it took, where there is more than one curve."""
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

    legend = _markers(study)
    if len(levels) > 1:
        sizes = {setting.values.get(HETEROGENEITY): area(setting) for setting in study.settings}
        legend += [
            Line2D([], [], linestyle="", color="#999999", marker="o", markersize=math.sqrt(size), label=_name(level))
            for level, size in sizes.items()
        ]
    caption = (
        f"Best {metric.label} and the communication it took, mean over the seeds: {_best_corner(metric)} is best; "
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


def score_against_step(study: Study) -> Iterator[Drawing]:
    """The best score against a client's memory, and against its floating-point operations."""
    metric = study.main_metric
    known = [series for series in study.series if series.step_memory("client") is not None]
    if len({series.algorithm for series in known}) < 2:
        return
    axes_of: dict[str, tuple[str, Callable[[Series], float]]] = {
        "client-memory": ("client's memory in a step, MB", lambda series: (series.step_memory("client") or 0) / 1e6),
        "client-flops": ("client's FLOPs in a step, 10⁹", lambda series: (series.step("client_step_flops") or 0) / 1e9),
    }
    legend = _markers(study)
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
            f"Best {metric.label} against {what} of a client's step, mean over the seeds: {_best_corner(metric)} is "
            "best; bars are one standard deviation"
        )
        yield from pages(f"{metric.file_name}-{name}", caption, by_setting(study), paint, legend=legend)


def _markers(study: Study) -> list[Line2D]:
    """A legend of markers without lines."""
    looks = [style(algorithm) for algorithm in study.algorithms]
    return [Line2D([], [], linestyle="", color=look.colour, marker=look.marker, label=look.name) for look in looks]


def _best_corner(metric: Metric) -> str:
    return "north-west" if metric.higher_is_better else "south-west"


def ablation(study: Study, path: str) -> Iterator[Drawing]:
    """The final and the best score against the values of an option."""
    metric = study.main_metric
    panels = [(rest.label, members) for rest, members in study.grouped(path) if len(members) > 1]

    def paint(axes: Axes, members: Sequence[Setting]) -> None:
        values = [setting.values[path] for setting in members]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        places = np.array(values if numeric else range(len(values)), dtype=float)
        joined = numeric or path == "model.auxiliary"  # which stands in the order of its size
        for algorithm in reversed(study.algorithms):
            series = [study.of(algorithm, setting) for setting in members]
            if concerns(algorithm_of(algorithm), path):
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

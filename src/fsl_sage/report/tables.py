"""The tables of a report: scores, what a target costs, memory and FLOPs of a step, every run."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsl_sage.report.load import Run
from fsl_sage.report.metric import LOSS, Metric
from fsl_sage.report.study import Series, Setting, Spread, Study
from fsl_sage.report.style import style
from fsl_sage.report.table_forms import DASH, Cell, Table
from fsl_sage.units import gib_number
from fsl_sage.wire.ledger import GIB

REFERENCE = "fsl-sage"
"""The algorithm that the others are set in relation to."""
WIDE = 6
"""With more settings than this a table has a row for each of them, and a column for each algorithm."""


def make_tables(study: Study, targets: Sequence[float]) -> list[Table]:
    """All tables for which the runs have data; `targets` are values of the headline score."""
    metric = study.main_metric
    tables = [_overview(study, metric, "best"), _overview(study, metric, "final")]
    if any(len(study.within(setting)) > 1 for setting in study.settings):
        tables.append(_overview(study, metric, "equal"))
    if metric is not LOSS:
        tables.append(_to_target(study, metric, targets))
    return [table for table in [*tables, _steps(study), _runs(study)] if table.rows and table.data]


# The headline score by algorithm and setting


def common_gib(study: Study, setting: Setting) -> float:
    """The GiB that every run of a setting has moved at least."""
    return min(series.least_gib for series in study.within(setting))


def _overview(study: Study, metric: Metric, which: str) -> Table:
    lines: list[list[Cell]] = []
    data = []
    for setting in study.settings:
        found = {series.algorithm: _value(study, setting, series, metric, which) for series in study.within(setting)}
        cells = _ranked([found.get(algorithm) for algorithm in study.algorithms], metric)
        name = setting.label or metric.label
        lines.append([Cell(f"{name}, {common_gib(study, setting):.3g} GiB" if which == "equal" else name), *cells])
        data += [_line_of(study, setting, which, metric, name, value) for name, value in found.items() if value]
    names = [style(algorithm).name for algorithm in study.algorithms]
    columns, rows = ["setting", *names], lines
    if len(lines) <= WIDE:
        columns = ["algorithm", *(line[0].text for line in lines)]
        rows = [[Cell(name), *(line[place + 1] for line in lines)] for place, name in enumerate(names)]
    seeds = "" if all(line["seeds"] == 1 for line in data) else ", mean ± standard deviation over the seeds"
    return Table(f"{which}-{metric.file_name}", _captions(metric, which) + seeds, columns, rows, data)


def _captions(metric: Metric, which: str) -> str:
    unit = f" ({metric.unit})" if metric.unit else ""
    captions = {
        "best": f"Best {metric.label}{unit} of any round",
        "final": f"Final {metric.label}{unit}, after the last round",
        "equal": f"Best {metric.label}{unit} at equal communication: "
        "within the GiB that every run of the setting has moved",
    }
    return captions[which]


def _value(study: Study, setting: Setting, series: Series, metric: Metric, which: str) -> Spread | None:
    if which == "final":
        return series.final(metric)
    return series.best(metric, common_gib(study, setting) if which == "equal" else math.inf)


def _line_of(
    study: Study, setting: Setting, which: str, metric: Metric, algorithm: str, value: Spread
) -> dict[str, Any]:
    series = study.of(algorithm, setting)
    assert series is not None
    gib = common_gib(study, setting) if which == "equal" else series.moved_gib
    return {
        **_setting_columns(study, setting),
        "algorithm": algorithm,
        metric.key if not metric.unit else f"{metric.key}_percent": round(value.mean, 4),
        "standard_deviation": round(value.std, 4) if value.seeds > 1 else "",
        "seeds": value.seeds,
        "gib": round(gib, 6),
        "rounds": series.rounds_within(gib) if which == "equal" else series.rounds,
    }


def _setting_columns(study: Study, setting: Setting) -> dict[str, Any]:
    return {path: setting.values.get(path, "") for path in study.varying}


def _ranked(values: Sequence[Spread | None], metric: Metric) -> list[Cell]:
    """The cells, ranked by what is printed: equal numbers share a rank."""
    digits = 2 if metric.unit else 3
    printed = {round(value.mean, digits) for value in values if value}
    order = sorted(printed, reverse=metric.higher_is_better)
    cells = []
    for value in values:
        if value is None:
            cells.append(Cell(DASH))
            continue
        place = order.index(round(value.mean, digits)) + 1
        spread = f"{value.std:.{digits}f}" if value.seeds > 1 else ""
        cells.append(Cell(f"{value.mean:.{digits}f}", spread, place if place <= 2 and len(order) > 1 else 0))
    return cells


# Bytes and rounds to a target


def default_target(study: Study, setting: Setting, metric: Metric) -> float | None:
    """The value of the headline score that ends the runs, if one does.

    Else, of a score in percent, the best whole 5 % that two algorithms of the setting reach with every seed (the only
    one, if it is alone).
    """
    asked = {run.options["target_accuracy"] for series in study.within(setting) for run in series.runs}
    if len(asked) == 1 and None not in asked:
        return float(asked.pop())
    if not metric.unit:
        return None
    judged = [each for each in study.within(setting) if each.has(metric)]
    if not judged:
        return None
    bests = [[metric.best(run.values(metric.key)) for run in each.runs] for each in judged]
    if metric.higher_is_better:
        reached = sorted(map(min, bests), reverse=True)[:2][-1]
        target = math.floor(reached * 20 + 1e-9) / 20
    else:
        reached = sorted(map(max, bests))[:2][-1]
        target = math.ceil(reached * 20 - 1e-9) / 20
    return target if target > 0 else None


def _to_target(study: Study, metric: Metric, targets: Sequence[float]) -> Table:
    rows, data = [], []
    for setting in study.settings:
        automatic = default_target(study, setting, metric)
        for target in targets or ([] if automatic is None else [automatic]):
            reference = study.of(REFERENCE, setting)
            judged = [series for series in study.within(setting) if series.has(metric)]
            lines = [_reach(series, metric, target, reference) for series in judged]
            least = sorted({line["gib"] for line in lines if line["all_reached"]})
            for line in lines:
                line["rank"] = least.index(line["gib"]) + 1 if line["all_reached"] and len(lines) > 1 else 0
                rows.append(_target_row(setting, metric.text(target), line))
                kept = ("algorithm", "reached", "seeds", "rounds", "gib", "ratio")
                own = {name: _rounded(line[name]) for name in kept}
                data.append({**_setting_columns(study, setting), "target": target, **own})
    columns = ["setting", "target", "algorithm", "seeds", "rounds", "GiB", f"GiB, × {style(REFERENCE).name}"]
    caption = (
        f"Communication (the paper's convention) and rounds to reach a {metric.label}, mean ± standard deviation over "
        "the seeds that reach it (how many of them do); “>”: target not reached, this is the total moved"
    )
    return Table("to-target", caption, columns, rows, data)


def _reach(series: Series, metric: Metric, target: float, reference: Series | None) -> dict[str, Any]:
    found = series.reaching(metric, target)
    runs = len(series.runs)
    gib = sum(gib for _, gib in found) / len(found) if found else None
    line = {
        "algorithm": series.algorithm,
        "reached": len(found),
        "seeds": runs,
        "all_reached": len(found) == runs,
        "rounds": sum(rounds for rounds, _ in found) / len(found) if found else None,
        "gib": gib,
        "spread": _deviation([gib for _, gib in found]),
        "moved": series.moved_gib,
        "ratio": None,
        "at_least": None,
    }
    base = reference.reaching(metric, target) if reference else []
    if reference and len(base) == len(reference.runs):
        mean = sum(gib for _, gib in base) / len(base)
        if len(found) == runs:
            line["ratio"] = gib / mean if gib is not None else None
        elif not found:
            line["at_least"] = series.moved_gib / mean
    return line


def _deviation(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    mean = sum(values) / len(values)
    return gib_number(math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)), like=mean)


def _target_row(setting: Setting, target: str, line: dict[str, Any]) -> list[Cell]:
    gib = (
        Cell(gib_number(line["gib"]), line["spread"], line["rank"] if line["rank"] <= 2 else 0) if line["gib"] else None
    )
    ratio = f"{line['ratio']:.2f}" if line["ratio"] else f"> {line['at_least']:.2f}" if line["at_least"] else DASH
    return [
        Cell(setting.label or DASH),
        Cell(target),
        Cell(style(line["algorithm"]).name),
        Cell(f"{line['reached']}/{line['seeds']}"),
        Cell(f"{line['rounds']:.1f}".removesuffix(".0") if line["rounds"] else DASH),
        gib or Cell(f"> {gib_number(line['moved'])}"),
        Cell(ratio),
    ]


def _rounded(value: Any, decimals: int = 6) -> Any:
    """A number with so many decimals; a small one with four digits that count."""
    if value is None:
        return ""
    if not isinstance(value, float) or not math.isfinite(value) or value == 0:
        return value
    return round(value, max(decimals, 3 - math.floor(math.log10(abs(value)))))


# Memory and FLOPs of a step

STEP = [f"{role}_{name}" for role in ("client", "server") for name in ("static_bytes", "working_bytes", "step_flops")]


def _steps(study: Study) -> Table:
    """One row for each algorithm, and for each setting where it makes a difference."""
    found: dict[str, dict[tuple[int | None, ...], Series]] = {}
    for series in study.series:
        if series.step(STEP[0]) is not None:
            found.setdefault(series.algorithm, {}).setdefault(tuple(map(series.step, STEP)), series)
    rows, data = [], []
    for algorithm in (name for name in study.algorithms if name in found):
        for values, series in found[algorithm].items():
            setting = series.setting.label if len(found[algorithm]) > 1 else ""
            rows.append([Cell(style(algorithm).name), Cell(setting or DASH), *_step_cells(values)])
            told = {name: "" if value is None else value for name, value in zip(STEP, values, strict=True)}
            data.append({"algorithm": algorithm, "setting": setting, **told})
    columns = ["algorithm", "setting"]
    for role in ("client", "server"):
        columns += [f"{role} static, MB", f"{role} working, MB", f"{role} memory, MB", f"{role} GFLOPs"]
    caption = (
        "Memory and floating-point operations of a step. Static: weights, gradients, optimizer; working: the most that "
        "autograd keeps at one moment; memory: both. MB are 10⁶ bytes"
    )
    return Table("step", caption, columns, rows, data)


def _step_cells(values: Sequence[int | None]) -> list[Cell]:
    cells = []
    for static, working, flops in (values[:3], values[3:]):
        if static is None or working is None or flops is None:
            cells += [Cell(DASH)] * 4
        else:
            cells += [Cell(_show(amount / 1e6)) for amount in (static, working, static + working)]
            cells.append(Cell(_show(flops / 1e9)))
    return cells


# Every run


def _runs(study: Study) -> Table:
    metric = study.main_metric
    data = [_line_of_run(series, run, metric) for series in study.series for run in series.all_runs]
    columns = [
        "run",
        "algorithm",
        "setting",
        "seed",
        "ended",
        "rounds",
        "best",
        "final",
        "GiB",
        "GiB in all",
        "seconds",
        "client MB",
        "client GFLOPs",
        "server MB",
        "server GFLOPs",
    ]
    rows = [[Cell(_show(value)) for value in line.values()] for line in data]
    return Table("runs", "Every run", columns, rows, data)


def _line_of_run(series: Series, run: Run, metric: Metric) -> dict[str, Any]:
    values = run.values(metric.key) * metric.scale
    known = np.isfinite(values)  # nothing where it is judged by another score
    last = run.metrics[-1]
    return {
        "run": run.name,
        "algorithm": run.algorithm,
        "setting": series.setting.label,
        "seed": run.seed,
        "ended": run.stopped or "unfinished",
        "rounds": len(run.metrics),
        "best": round(metric.best(values), 4) if known.any() else "",
        "final": round(float(values[-1]), 4) if known[-1] else "",
        "gib": round(last["bytes_paper"] / GIB, 6),
        "gib_in_all": round(last["bytes_total"] / GIB, 6),
        "seconds": round(last["elapsed_seconds"], 1),
        **_step_of_run(run),
    }


def _step_of_run(run: Run) -> dict[str, Any]:
    """Memory and FLOPs of a step; empty where they are unknown."""
    line: dict[str, Any] = {}
    for role in ("client", "server"):
        static, working, flops = (
            run.once(f"{role}_{name}") for name in ("static_bytes", "working_bytes", "step_flops")
        )
        known = static is not None and working is not None
        line[f"{role}_memory_mb"] = _rounded((static + working) / 1e6, 3) if known else ""  # type: ignore[operator]
        line[f"{role}_gflops"] = "" if flops is None else _rounded(flops / 1e9, 4)
    return line


def _show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < 1e-3:  # where "g" would turn to powers of ten
        return np.format_float_positional(value, 4, fractional=False, trim="-")
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"

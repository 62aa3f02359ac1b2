"""report.html: one file with everything in it, plotly.js too, that opens offline."""

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from plotly.offline import get_plotlyjs

from fsl_sage.config import option
from fsl_sage.report.metric import COSINE, NMSE, Metric
from fsl_sage.report.panels import Drawing
from fsl_sage.report.study import Series, Study
from fsl_sage.report.style import style
from fsl_sage.report.table_forms import Cell, Table, to_html

SHORT = {COSINE: "fidelity (cosine)", NMSE: "fidelity (NMSE)"}
"""What metrics are called where there is little room, if not by their own short names."""
FINDINGS = 6
"""Settings whose target is told above all; the table has the rest."""


def make_page(
    title: str,
    study: Study,
    tables: Sequence[Table],
    figures: Sequence[tuple[Drawing, bytes]],
    notes: Sequence[str],
    bandwidth: float,
) -> str:
    """The page; `figures` come with their PNGs."""
    page = files("fsl_sage.report") / "page"
    return Template((page / "report.html").read_text("utf-8")).substitute(
        title=html.escape(title),
        style=(page / "report.css").read_text("utf-8"),
        lead=html.escape(_lead(study)),
        notes=_notes(notes),
        findings=_findings(study.main_metric, tables),
        tables="\n".join(_table(table) for table in tables),
        figures="\n".join(_figure(drawing, png) for drawing, png in figures),
        configuration=_configuration(study),
        bandwidth=f"{bandwidth:g}",
        plotly=get_plotlyjs(),
        data=json.dumps(_data(study), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=(page / "report.js").read_text("utf-8"),
    )


def _lead(study: Study) -> str:
    def told(values: Sequence[str]) -> str:
        unique = list(dict.fromkeys(values))
        return " and ".join([", ".join(unique[:-1]), unique[-1]] if len(unique) > 1 else unique)

    runs = f"{len(study.runs)} run{'s' if len(study.runs) > 1 else ''}"
    unfinished = sum(run.stopped is None for run in study.runs)
    return (
        f"{told(_all(study, 'model.name'))} on {told(_all(study, 'data.name'))}, "
        f"{told(_all(study, 'clients'))} {_clients(study)}: {told([style(name).name for name in study.algorithms])}. "
        f"{runs}{f', {unfinished} of them unfinished' if unfinished else ''}."
    )


def _clients(study: Study) -> str:
    return "client" if {*_all(study, "clients")} == {"1"} else "clients"


def _all(study: Study, path: str) -> list[str]:
    return [str(run.options[path]) for run in study.runs]


def _notes(notes: Sequence[str]) -> str:
    lines = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f'<div class="notes">{lines}</div>' if notes else ""


def _findings(metric: Metric, tables: Sequence[Table]) -> str:
    """For each setting, the GiB that each algorithm needs to a target; the least first."""
    table = next((table for table in tables if table.name == "to-target"), None)
    if table is None:
        return ""
    groups: dict[tuple[str, str], list[tuple[float, Any]]] = {}
    for row, line in zip(table.rows, table.data, strict=True):
        least = line["gib"] if line["gib"] != "" and line["reached"] == line["seeds"] else math.inf
        groups.setdefault((row[0].text, row[1].text), []).append((least, (row, line)))
    tiles = [
        _finding(f"{target} {metric.label}", setting, sorted(lines, key=lambda line: line[0]))
        for (setting, target), lines in groups.items()
        if len(lines) > 1
    ]
    return f'<div class="findings">{"".join(tiles[:FINDINGS])}</div>' if tiles else ""


def _finding(target: str, setting: str, lines: Sequence[tuple[float, Any]]) -> str:
    first_gib, (_, first) = lines[0]
    look = style(first["algorithm"])
    where = html.escape(target + (f", {setting}" if setting.strip("–") else ""))
    if not math.isfinite(first_gib):
        return f'<div class="finding"><p class="where">{where}</p><p class="winner">reached by none</p></div>'
    items = []
    for gib, (row, record) in lines[1:]:
        name = html.escape(style(record["algorithm"]).name)
        if math.isfinite(gib):
            told = f"{gib:.3g} GiB ({gib / first_gib:.1f} ×)"
        elif record["reached"]:
            told = f"{record['reached']} of {record['seeds']} seeds"
        else:
            told = f"{row[5].text} GiB"
        items.append(f"<li><span>{name}</span><span>{html.escape(told)}</span></li>")
    return (
        f'<div class="finding"><p class="where">{where}</p><p class="winner"><i style="background:{look.colour}"></i>'
        f"{html.escape(look.name)}: {first_gib:.3g} GiB</p><ul>{''.join(items)}</ul></div>"
    )


def _table(table: Table) -> str:
    caption = html.escape(table.caption)
    if table.name == "runs":
        return f'<details><summary>{caption}</summary><div class="scroll">{to_html(table)}</div></details>'
    return f'<div class="table" id="{html.escape(table.name)}"><p class="caption">{caption}.</p>{to_html(table)}</div>'


def _figure(drawing: Drawing, png: bytes) -> str:
    width, height = drawing.figure.get_size_inches()
    wide = ' class="wide"' if width > 1.8 * height else ""
    text, source = html.escape(drawing.caption), base64.b64encode(png).decode()
    image = f'<img alt="{text}" src="data:image/png;base64,{source}">'
    return f"<figure{wide}>{image}<figcaption>{text}.</figcaption></figure>"


def _configuration(study: Study) -> str:
    options = [run.options for run in study.runs]
    hidden = {"out", "workers", "seed", "algorithm"}
    paths = [path for path in dict.fromkeys(path for own in options for path in own) if path not in hidden]
    shared = [path for path in paths if all(path in own for own in options)]
    same = {path: options[0][path] for path in shared if all(own[path] == options[0][path] for own in options)}
    differ = [path for path in paths if path not in same]
    environments = list(dict.fromkeys(run.environment for run in study.runs if run.environment))
    parts = [f"<details open><summary>Options that all runs share</summary>{_definitions(same)}</details>"]
    if differ:
        rows = [[Cell(text) for text in _own_options(series, differ)] for series in study.series]
        table = to_html(Table("options", "", ["algorithm", "seeds", *map(option, differ)], rows, []))
        summary = "<summary>Options that differ between runs</summary>"
        parts.append(f'<details>{summary}<div class="scroll">{table}</div></details>')
    parts += [f'<p class="hint">{html.escape(environment)}</p>' for environment in environments]
    return "\n".join(parts)


def _own_options(series: Series, paths: Sequence[str]) -> list[str]:
    own = [run.options for run in series.all_runs]
    seeds = ", ".join(str(run.seed) for run in series.all_runs)
    values = (dict.fromkeys(_text(each.get(path)) for each in own) for path in paths)
    return [series.algorithm, seeds, *(", ".join(each) for each in values)]


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def _definitions(values: Mapping[str, Any]) -> str:
    pairs = ((option(path), _text(value)) for path, value in values.items())
    return f"<dl>{''.join(f'<div><dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd></div>' for a, b in pairs)}</dl>"


# What the script draws


def _data(study: Study) -> dict[str, Any]:
    metrics = [*study.curves, *study.fidelities]
    looks = [style(algorithm) for algorithm in study.algorithms]
    return {
        "algorithms": [{"name": look.name, "colour": look.colour, "dash": look.dash} for look in looks],
        "settings": [setting.label for setting in study.settings],
        "metrics": [_metric(metric) for metric in metrics],
        "frozen": study.has_frozen_weights,
        "series": [_series(study, series, metrics) for series in study.series],
        "shades": [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 0.85, 24))],
    }


def _metric(metric: Metric) -> dict[str, str]:
    return {"key": metric.key, "label": metric.label, "unit": metric.unit, "short": SHORT.get(metric, metric.short)}


def _series(study: Study, series: Series, metrics: Sequence[Metric]) -> dict[str, Any]:
    first = series.curve(metrics[0])
    places = [place for place, setting in enumerate(study.settings) if setting.covers(series.setting)]
    values = {}
    for metric in metrics:
        if series.has(metric):
            curve = series.curve(metric)
            best = series.best(metric)
            values[metric.key] = {
                "mean": _numbers(curve.mean),
                "std": _numbers(curve.std),
                "best": _numbers(np.array([best.mean, best.std])) if best else None,
            }
    return {
        "algorithm": study.algorithms.index(series.algorithm),
        "settings": places,
        "label": series.setting.label,
        "seeds": len(series.runs),
        "rounds": first.rounds.tolist(),
        "gib": _numbers(first.gib),
        "whole_gib": _numbers(first.whole_gib),
        "seconds": _numbers(first.seconds),
        "memory": _scaled(series.step_memory("client"), 1e6),
        "flops": _scaled(series.step("client_step_flops"), 1e9),
        "values": values,
    }


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else float(f"{value / unit:.6g}")


def _numbers(values: np.ndarray) -> list[float | None]:
    """Six digits; null for what was not measured."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]

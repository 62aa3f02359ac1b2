"""The cuts of a model in the terminal and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment, Segments
from rich.table import Table

from fsl_sage.algorithms import ALGORITHMS, find_algorithm
from fsl_sage.config import Config
from fsl_sage.errors import listed
from fsl_sage.experiment.cuts import CutCosts, Limits, recommend
from fsl_sage.records.subject import clients_text
from fsl_sage.units import bytes_text, operations_text


def print_cuts(console: Console, config: Config, table: Sequence[CutCosts], limits: Limits) -> None:
    """What a cut asks of the two sides, what a round moves there, and the recommendation."""
    told = (
        f"Cuts of {config.model.name}, batch {config.batch_size}, {clients_text(config.clients)}, {config.algorithm}."
    )
    console.print(told, highlight=False, markup=False)
    _print_whole(console, _sizes_table(table, limits))
    console.print(
        f"FLOPs and memory: of a step of {config.algorithm}, with all that its client and its S-server hold.",
        highlight=False,
        markup=False,
    )
    if any(row.revealed is not None for row in table):
        console.print(
            "Reveals: distance correlation of images with what crosses; 1 is the image itself.", highlight=False
        )
    console.print(
        "Bytes of a round (labels included; fsl-sage when it does not align; - where there is no such auxiliary):",
        highlight=False,
    )
    _print_whole(console, _bytes_table(table, limits))
    wrapped: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": not console.is_terminal}
    if left_out := _left_out(table):
        console.print(left_out, **wrapped)
    console.print(recommend(table, limits, config.algorithm), **wrapped)


def _print_whole(console: Console, shown: Table) -> None:
    """A table in its full width: a number that is cut off would mislead."""
    natural = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
    for line in console.render_lines(shown, console.options.update(width=natural)):
        console.print(Segments([*line, Segment.line()]), soft_wrap=True)


def _sizes_table(table: Sequence[CutCosts], limits: Limits) -> Table:
    columns = (
        "client\nweights",
        "client\nbytes",
        "server\nbytes",
        "sent a\nsample",
        "client\nFLOPs",
        "server\nFLOPs",
        "client\nmemory",
        "server\nmemory",
    )
    shown = _empty_table(*columns, "reveals", "fits")
    for row in table:
        point, obstacles = row.point, row.obstacles(limits)
        shown.add_row(
            escape(point.name),
            operations_text(point.client_parameters),
            *map(bytes_text, (point.client_bytes, point.server_bytes, point.activation_bytes)),
            *("-" if step is None else operations_text(step.step_flops) for step in (row.client, row.server)),
            *("-" if step is None else bytes_text(step.memory) for step in (row.client, row.server)),
            "-" if row.revealed is None else f"{row.revealed:.2f}",
            _fits(obstacles),
            style="dim" if obstacles else None,
        )
    return shown


def _fits(obstacles: Sequence[str]) -> str:
    if not obstacles:
        return "yes"
    return "no auxiliary" if "auxiliary" in obstacles else f"no: {', '.join(obstacles)}"


def _bytes_table(table: Sequence[CutCosts], limits: Limits) -> Table:
    """Algorithms that move the same bytes at every cut have one column, so that the table fits a terminal."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for algorithm in table[0].round_bytes:
        moved = (row.round_bytes[algorithm] for row in table)
        columns.setdefault(tuple("-" if each is None else bytes_text(each) for each in moved), []).append(algorithm)
    shown = _empty_table(*map("\n".join, columns.values()))
    for row, *cells in zip(table, *columns, strict=True):
        shown.add_row(escape(row.point.name), *cells, style="dim" if row.obstacles(limits) else None)
    return shown


def _left_out(table: Sequence[CutCosts]) -> str:
    """A sentence on the algorithms that have no column."""
    names = [name for name in ALGORITHMS if name not in table[0].round_bytes]
    like = {name: kind for name in names if (kind := find_algorithm(name).moves_like) in table[0].round_bytes}
    said = [f"{name} moves the bytes of {kind}." for name, kind in like.items()]
    if others := [name for name in names if name not in like]:
        are, their = ("is", "its") if len(others) == 1 else ("are", "their")
        said.append(f"{listed(others)} {are} left out: 'fsl-sage cost --model.cut NAME' has {their} bytes at one cut.")
    return " ".join(said)


def _empty_table(*columns: str) -> Table:
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    shown.add_column("cut after", no_wrap=True)
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    return shown


def as_json(table: Sequence[CutCosts], limits: Limits, algorithm: str) -> dict[str, Any]:
    """The same as plain data."""
    cuts = [
        {
            "name": row.point.name,
            "client_parameters": row.point.client_parameters,
            "server_parameters": row.point.server_parameters,
            "client_bytes": row.point.client_bytes,
            "server_bytes": row.point.server_bytes,
            "activation_bytes": row.point.activation_bytes,
            "client_flops": row.client and row.client.step_flops,
            "server_flops": row.server and row.server.step_flops,
            "client_memory": row.client and row.client.memory,
            "server_memory": row.server and row.server.memory,
            "client_step": row.client and asdict(row.client),
            "server_step": row.server and asdict(row.server),
            "revealed": row.revealed,
            "round_bytes": row.round_bytes,
            "obstacles": row.obstacles(limits),
        }
        for row in table
    ]
    return {"cuts": cuts, "recommendation": recommend(table, limits, algorithm)}

"""Where to cut a model: every cut with what it costs, what fits given limits, and a recommendation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segment, Segments
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter

from fsl_sage.config import Config
from fsl_sage.engines.setup import META, build_model, data_sizes
from fsl_sage.errors import InputError
from fsl_sage.experiment import cost
from fsl_sage.models import is_language_model, is_trained_in_auxiliary, statistics_names, usual_auxiliary
from fsl_sage.records.files import write_bytes
from fsl_sage.report.style import style
from fsl_sage.split import Analysis, AuxiliaryStates, CutPoint, SplitError, cut_points_of
from fsl_sage.units import bytes_text, operations_text
from fsl_sage.wire.message import ACTIVATIONS, AUXILIARY, CLIENT_MODEL, CUT_GRADIENTS, nbytes


@dataclass(frozen=True)
class Limits:
    """What a client can afford; None is no limit."""

    client_memory: float | None = None
    """Bytes of memory for a training step."""
    uplink: float | None = None
    """Bytes that a client may send in a round."""
    client_flops: float | None = None
    """Floating-point operations of a training step."""


@dataclass(frozen=True)
class Row:
    """A cut with the bytes that a round costs there, by algorithm (None where there is no such auxiliary)."""

    point: CutPoint
    round_bytes: dict[str, int | None]
    sent: int | None
    """Bytes that one client sends in a round of the configured algorithm."""

    def obstacles(self, limits: Limits) -> list[str]:
        """Which limits this cut breaks."""
        wanted = {
            "memory": (self.point.client_memory, limits.client_memory),
            "uplink": (self.sent, limits.uplink),
            "FLOPs": (self.point.client_flops, limits.client_flops),
        }
        return [name for name, (need, limit) in wanted.items() if limit is not None and (need is None or need > limit)]


def rows(config: Config) -> list[Row]:
    """Every cut of the configured model, computed on the meta device: no weight is ever allocated."""
    sizes = data_sizes(config)
    model = build_model(config, sizes, META)
    analysis = Analysis(model, sizes.largest_example(config.batch_size, META))
    points = cut_points_of(analysis)
    if not points:
        raise InputError(
            f"--model.name {config.model.name} cannot be cut anywhere: its parameters are all in one module."
        )
    if config.model.cut is not None and config.model.cut not in {point.name for point in points}:
        raise InputError(
            f"--model.cut {config.model.cut} is not a cut of {config.model.name}: give one of {_names(points)}."
        )
    travelling = _Travelling(config, analysis)
    travels = {point.name: travelling.at(point) for point in points}
    # A round's bytes of each kind are in proportion to what travels, so the ledger of one cut where all kinds do, if
    # there is one, gives those of all cuts.
    known = max(travels, key=lambda name: sum(map(bool, travels[name].values())))
    costs = cost(replace(config, model=replace(config.model, cut=known)))
    return [_row(config, costs, point, travels[point.name], travels[known]) for point in points]


class _Travelling:
    """The bytes of what travels, by the ledger's kinds; only those that depend on the cut."""

    def __init__(self, config: Config, analysis: Analysis) -> None:
        self._analysis = analysis
        self._auxiliaries = AuxiliaryStates(analysis, config.model.auxiliary or usual_auxiliary(analysis.model))
        self._config = config
        local = config.model.batch_norm == "local"
        self._stays = statistics_names(analysis.model) if local else frozenset()

    def at(self, point: CutPoint) -> dict[str, int | None]:
        """At one cut; None for an auxiliary that there is not."""
        parts, _ = self._analysis.parts([point.name], tied="untie")
        client = {name: self._analysis.tensors[name] for name in parts["client"] if name in self._analysis.saved}
        return {
            CLIENT_MODEL: self._averaged(client),
            AUXILIARY: self._auxiliary(point.name),
            ACTIVATIONS: sum(tensor.nbytes for tensor in point.tensors),
            CUT_GRADIENTS: sum(tensor.nbytes for tensor in point.tensors if tensor.has_gradient),
        }

    def _auxiliary(self, cut: str) -> int | None:
        try:
            state = self._auxiliaries.at(cut)
        except SplitError:
            return None
        return self._averaged(state) + (self._opened(state) if is_language_model(self._analysis.model) else 0)

    def _opened(self, state: Mapping[str, Tensor]) -> int:
        """Weights of a language model that are trained in its auxiliary alone."""
        model, lora = self._analysis.model, self._config.lora
        frozen = {name: x for name, x in state.items() if isinstance(x, Parameter) and not x.requires_grad}
        return nbytes({name: x for name, x in frozen.items() if is_trained_in_auxiliary(model, lora, name)})

    def _averaged(self, tensors: Mapping[str, Tensor]) -> int:
        """Frozen weights stay where they are, and tied ones travel once."""
        travel = (tensor for name, tensor in tensors.items() if name not in self._stays)
        unique = {id(tensor): tensor for tensor in travel if tensor.requires_grad or not isinstance(tensor, Parameter)}
        return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def _names(points: Sequence[CutPoint]) -> str:
    return ", ".join(point.name for point in points)


def _row(
    config: Config,
    costs: dict[str, dict[str, Any]],
    point: CutPoint,
    here: Mapping[str, int | None],
    there: Mapping[str, int | None],
) -> Row:
    """The costs of the cut where what is `there` travels, for the one where what is `here` does."""

    def scaled(by_kind: dict[str, dict[str, int]], ways: Sequence[str]) -> int | None:
        total = 0
        for kind, table in by_kind.items():
            size, reference = here.get(kind, 1), there.get(kind, 1)
            if size is None or reference is None:
                return None
            total += sum(table[way] for way in ways) * size // (reference or 1)
        return total

    both = ("up", "down")
    by_algorithm = {name: scaled(row["by_kind"], both) for name, row in costs.items() if name != "lazy-fsl-sage"}
    if here[AUXILIARY] is None:
        by_algorithm["fsl-sage"] = None
    sent = scaled(costs[config.algorithm]["by_kind"], ("up",))
    cohort = max(1, round(config.cohort * config.clients))
    return Row(point, by_algorithm, None if sent is None else sent // cohort)


def best(table: Sequence[Row], limits: Limits, algorithm: str) -> Row | None:
    """Of the cuts that fit, the one where a round moves the fewest bytes; of such, the one with the fewest FLOPs."""
    fitting = [row for row in _possible(table, algorithm) if not row.obstacles(limits)]
    moved = _column(algorithm)
    return min(fitting, key=lambda row: (row.round_bytes[moved] or 0, row.point.client_flops), default=None)


def _column(algorithm: str) -> str:
    return "fsl-sage" if algorithm == "lazy-fsl-sage" else algorithm


def _possible(table: Sequence[Row], algorithm: str) -> list[Row]:
    """Where there is an auxiliary, and a client that has something to train."""
    moved = _column(algorithm)
    return [row for row in table if row.round_bytes[moved] is not None and row.point.client_trainable_bytes]


def recommend(table: Sequence[Row], limits: Limits, algorithm: str) -> str:
    """The cut to take, and why, in a sentence or two."""
    possible, chosen = _possible(table, algorithm), best(table, limits, algorithm)
    if chosen is None:
        least = min(possible or table, key=lambda row: len(row.obstacles(limits)))
        broken = " and ".join(least.obstacles(limits)) or "its auxiliary"
        return f"No cut fits these limits; {least.point.name} comes closest, it only breaks {broken}."
    out = sum(bool(row.obstacles(limits)) for row in possible)
    among = f"Of the {len(possible) - out} cuts that fit ({out} do not)" if out else f"Of {len(possible)} cuts"
    moved = chosen.round_bytes[_column(algorithm)] or 0
    return (
        f"Recommended: {chosen.point.name}. {among} a round of {algorithm} moves the fewest bytes there, "
        f"{bytes_text(moved)}; a client's step needs {bytes_text(chosen.point.client_memory)} of memory."
    )


def print_cuts(console: Console, config: Config, table: Sequence[Row], limits: Limits) -> None:
    """What a cut asks of the two sides, what a round moves there, and the recommendation."""
    console.print(f"Cuts of {config.model.name}, batch {config.batch_size}, {config.clients} clients.", highlight=False)
    _print_whole(console, _sizes_table(table, limits))
    console.print(
        "Bytes of a round (labels included; fsl-sage when it does not align; - where there is no such auxiliary):",
        highlight=False,
    )
    _print_whole(console, _bytes_table(table, limits))
    console.print(recommend(table, limits, config.algorithm), highlight=False, soft_wrap=True)


def _print_whole(console: Console, shown: Table) -> None:
    """A table as wide as it is: a number that is cut off is no number."""
    natural = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
    for line in console.render_lines(shown, console.options.update(width=natural)):
        console.print(Segments([*line, Segment.line()]), soft_wrap=True)


def _sizes_table(table: Sequence[Row], limits: Limits) -> Table:
    columns = (
        "client\nweights",
        "client\nbytes",
        "server\nbytes",
        "sent a\nsample",
        "client\nFLOPs",
        "server\nFLOPs",
    )
    shown = _empty_table(*columns, "client\nmemory", "fits")
    for row in table:
        point, obstacles = row.point, row.obstacles(limits)
        shown.add_row(
            point.name,
            operations_text(point.client_parameters),
            *map(bytes_text, (point.client_bytes, point.server_bytes, point.activation_bytes)),
            *map(operations_text, (point.client_flops, point.server_flops)),
            bytes_text(point.client_memory),
            f"not {', '.join(obstacles)}" if obstacles else "yes",
            style="dim" if obstacles else None,
        )
    return shown


def _bytes_table(table: Sequence[Row], limits: Limits) -> Table:
    shown = _empty_table(*table[0].round_bytes)
    for row in table:
        cells = ("-" if moved is None else bytes_text(moved) for moved in row.round_bytes.values())
        shown.add_row(row.point.name, *cells, style="dim" if row.obstacles(limits) else None)
    return shown


def _empty_table(*columns: str) -> Table:
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    shown.add_column("cut after", no_wrap=True)
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def as_json(table: Sequence[Row], limits: Limits, algorithm: str) -> dict[str, Any]:
    """The same as plain data."""
    cuts = [
        {
            "name": row.point.name,
            "client_parameters": row.point.client_parameters,
            "server_parameters": row.point.server_parameters,
            "client_bytes": row.point.client_bytes,
            "server_bytes": row.point.server_bytes,
            "activation_bytes": row.point.activation_bytes,
            "client_flops": row.point.client_flops,
            "server_flops": row.point.server_flops,
            "client_memory": row.point.client_memory,
            "round_bytes": row.round_bytes,
            "obstacles": row.obstacles(limits),
        }
        for row in table
    ]
    return {"cuts": cuts, "recommendation": recommend(table, limits, algorithm)}


def cuts_figure(path: Path, config: Config, table: Sequence[Row], limits: Limits) -> None:
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
        f"Where to cut {config.model.name} (a step has {config.batch_size} samples, a round {config.clients} clients)"
    )
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_bytes(path, image.getvalue())


def _draw_client(axes: Axes, table: Sequence[Row], limits: Limits) -> None:
    """Memory as bars, FLOPs as a line; a cut that does not fit the limits is pale."""
    colours = ["#E3E3E3" if row.obstacles(limits) else "#9CB4CC" for row in table]
    axes.bar(range(len(table)), [row.point.client_memory / 1e6 for row in table], color=colours)
    axes.set_ylabel("client's memory, MB")
    if "#E3E3E3" in colours:
        axes.set_title("pale: does not fit the limits", loc="left", fontsize="small")
    flops = axes.twinx()
    flops.plot([row.point.client_flops / 1e9 for row in table], color="#333333", marker="o", markersize=4)
    flops.set_ylabel("client's FLOPs, 10⁹ (line)")
    flops.set_ylim(bottom=0)


def _draw_bytes(axes: Axes, table: Sequence[Row]) -> None:
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
    axes.legend(frameon=False, fontsize="small", ncols=2)

"""What a person sees in the terminal: the live display of a run, its summary, and the table of costs."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Table

from fsl_sage.config import Config, all_options
from fsl_sage.records.pace import time_left
from fsl_sage.records.plain_lines import PlainLines, describe, round_cells
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.subject import clients_text
from fsl_sage.records.trackers import Tracker, numbers
from fsl_sage.units import gib_text

SHOWN = 12
"""Rounds that the live table shows; earlier ones scroll away."""


class Display(Tracker):
    """A live table in a terminal; plain lines where the output goes to a file or a pipe."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.directory: Path | None = None
        self._rows: list[list[str]] = []
        self._first: dict[str, Any] | None = None
        self._live: Live | None = None
        self._status: Status | None = None
        self._lines = PlainLines(lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """Say what runs, and put up the table."""
        self._config = config
        self._first = done[0] if done else None
        self._score = RunDirectory(directory).score()
        self.directory = directory
        if not self.console.is_terminal:
            self._lines.start(config, directory, done)
            return
        self.stop()  # a run that goes on after a loss starts again
        self.console.print(f"[bold]{escape(config.algorithm)}[/] · {escape(describe(config, len(done)))}")
        self.console.print(f"files in [bold]{escape(str(directory))}[/]", highlight=False)
        self._rows = [self._row(line) for line in done[-SHOWN:]]
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left: {task.fields[left]}"),
            TextColumn("{task.fields[doing]}", style="dim", markup=False),
            console=self.console,
        )
        self._task = self._bar.add_task("rounds", total=config.rounds, completed=len(done), left="…", doing="")
        self._live = Live(self._view(), console=self.console, refresh_per_second=4)
        self._live.start()

    def activity(self, doing: str) -> None:
        """Say it beside the bar; before there is one, in a line of its own that goes away."""
        if self._live is not None:
            self._bar.update(self._task, doing=doing)
        elif self.directory is None and self.console.is_terminal:
            if self._status is None:
                self._status = self.console.status(escape(doing))
                self._status.start()
            self._status.update(escape(doing))
        elif not self.console.is_terminal:
            self._lines.activity(doing)

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def round(self, metrics: dict[str, Any]) -> None:
        """One more row."""
        if self._live is None:
            self._lines.round(metrics)
            return
        self._rows.append(self._row(metrics))
        self._first = self._first or metrics
        config = self._config
        left = time_left(metrics, config.rounds, config.budget_gib, config.max_seconds, self._first)
        self._bar.update(self._task, completed=metrics["round"] + 1, left=_duration(left))
        self._live.update(self._view())

    def finish(self, result: dict[str, Any]) -> None:
        """Leave the last state on the screen."""
        self.stop()

    def stop(self) -> None:
        """Take the live table down; may be called more than once."""
        self._end_status()
        if self._live is not None:
            self._bar.update(self._task, doing="")
            self._live.stop()
            self._live = None

    def _view(self) -> Group:
        table = Table(box=None, padding=(0, 2), header_style="bold")
        for name in ("round", self._score.title, "test loss", "GiB moved", "fidelity (cosine)", "time"):
            table.add_column(name, justify="right")
        for row in self._rows[-SHOWN:]:
            table.add_row(*row)
        return Group(table, self._bar)

    def _row(self, metrics: dict[str, Any]) -> list[str]:
        return [str(metrics["round"] + 1), *round_cells(metrics, self._score)]


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def print_summary(console: Console, directory: Path, config: Config, result: dict[str, Any]) -> None:
    """How the run ended and where its files are."""
    run = RunDirectory(directory)
    score = run.score()
    loss = "" if result["final_loss"] is None else f", loss {result['final_loss']:.3f}"
    paper, total, whole = (gib_text(result[f"bytes_{name}"]) for name in ("paper", "total", "whole_models"))
    rows = {
        "algorithm": config.algorithm,
        "ended": result["stopped"],
        f"best {score.short}": f"{score.text(result['best_score'], 2)} (round {result['best_round'] + 1})",
        f"final {score.short}": score.text(result["final_score"], 2) + loss,
        "moved": f"{paper} by the paper's convention, {total} in all",
        "": f"{whole} if whole models travelled, as in the paper",
        "time": _duration(result["elapsed_seconds"]),
    }
    if result["bytes_whole_models"] == result["bytes_paper"]:
        del rows[""]
    table = Table(title="Result", title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, said in rows.items():
        table.add_row(name, escape(said))
    console.print()
    console.print(table)
    files = {
        "model": run.model_file,
        "metrics": run.metrics_file,
        "ledger": run.ledger_file,
        "figure": run.figure(score),
    }
    width = max(map(len, rows)) + 4  # as wide as the table's first column
    for name, file in files.items():  # outside of the table, which would cut off a long path
        console.print(f"  {name:<{width}}{file}", highlight=False, markup=False, soft_wrap=True)


def print_metrics(console: Console, run: RunDirectory, data: str, metrics: dict[str, Any]) -> None:
    """The metrics of a model on a test set, the headline score first."""
    score = run.score()
    told = f"{run.config().model.name} of {run.path}, tested on {data}:"
    console.print(told, highlight=False, markup=False, soft_wrap=True)
    console.print(f"  {score.title:<20}{score.text(metrics[score.name], 2)}", highlight=False)
    for name, value in numbers(metrics).items():
        if name != score.name:
            console.print(f"  {name.replace('_', ' '):<20}{value:.4g}", highlight=False)


def print_costs(
    console: Console, costs: dict[str, dict[str, Any]], sizes: dict[str, dict[str, int]], config: Config
) -> None:
    """Sizes of the model's parts, and bytes of a round by algorithm, kind and direction."""
    counted = (f"{part} {row['parameters_and_buffers']:,} ({row['trained']:,} trained)" for part, row in sizes.items())
    console.print(f"Parameters and buffers: {', '.join(counted)}.", highlight=False)
    if any(row["in_paper"] != row["parameters_and_buffers"] for row in sizes.values()):
        paper = ", ".join(f"{part} {row['in_paper'] / 1e6:.1f} M" for part, row in sizes.items())
        console.print(
            f"With the causal masks that older code of GPT-2 held as buffers, as the paper counts: {paper}.",
            highlight=False,
        )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("algorithm", style="bold")
    table.add_column("kind")
    table.add_column("up", justify="right")
    table.add_column("down", justify="right")
    for name, row in costs.items():
        _add_cost(table, escape(name), row)
        if "by_kind_aligning" in row:
            _add_cost(table, "  when it aligns", row, "_aligning")
    bound = any(row["is_upper_bound"] for row in costs.values())
    what = "Upper bounds on the bytes" if bound else "Bytes"
    every = all_options(config.options).get("upload_every")
    uploads = "" if every is None else f", uploads every {every} steps"
    console.print(
        f"{what} of a round: {config.model.name} on {config.data.name}, {clients_text(config.clients)}, "
        f"batch {config.batch_size}{uploads}.",
        highlight=False,
        markup=False,
    )
    console.print(table)
    once = max(row["bytes_first_download"] for row in costs.values())
    console.print(
        "By the paper's convention labels and the first download are left out; the latter, once for all clients, "
        f"is {once:,} bytes at most.",
        highlight=False,
    )
    if bound and config.codec.compresses:
        console.print("Upper bounds, because what zstd saves depends on the numbers.", highlight=False)
    elif bound:
        console.print(
            f"Upper bounds, because the texts are not here: each is taken to have {config.data.sequence_length} "
            "tokens. With --data.dir and a tokenizer the figures are exact.",
            highlight=False,
        )


def _add_cost(table: Table, name: str, row: dict[str, Any], when: str = "") -> None:
    for kind, ways in row[f"by_kind{when}"].items():
        table.add_row(name, kind, *(f"{ways[way]:,}" if ways[way] else "" for way in ("up", "down")))
        name = ""
    paper, whole = row[f"bytes_paper{when}"], row[f"bytes_whole_models{when}"]
    table.add_row("", "[bold]paper's convention", "", f"[bold]{paper:,}")
    if whole != paper:
        table.add_row("", "if whole models travelled", "", f"{whole:,}")
    table.add_row("", "everything", "", f"{row[f'bytes_total{when}']:,}", end_section=True)

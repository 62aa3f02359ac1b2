"""Samples of a language model in the terminal."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fsl_sage.text.samples import Sample
from fsl_sage.text.scores import SCORES, Scores

REFERENCES_SHOWN = 3


@contextmanager
def progress_bar(console: Console, title: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar in a terminal, nothing elsewhere; its value is told how many are done, and perhaps of how many."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, total=total: bar.update(task, completed=done, total=total)


def print_samples(console: Console, samples: Sequence[Sample]) -> None:
    """Print each with its meaning, its references and what was generated."""
    for sample in samples:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right", no_wrap=True)
        table.add_column()
        table.add_row("meaning", f"[bold]{escape(sample.meaning)}[/]")
        for place, reference in enumerate(sample.references[:REFERENCES_SHOWN]):
            table.add_row("" if place else "people wrote", escape(reference))
        if (more := len(sample.references) - REFERENCES_SHOWN) > 0:
            table.add_row("", f"[dim]and {more} more[/]")
        if sample.before is not None:
            table.add_row("before training", _shown(sample.before))
        table.add_row("generated", f"[green]{_shown(sample.generated)}[/]")
        console.print(Padding(table, (0, 0, 1, 0)), highlight=False)


def _shown(text: str) -> str:
    return escape(text) if text else "[dim](nothing)[/]"


def print_scores(console: Console, scores: dict[str, Scores], losses: dict[str, float]) -> None:
    """Print the scores before and after training, and the notes on how they were computed."""
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    table.add_column("")
    for when in scores:
        table.add_column(f"{when} training", justify="right")
    table.add_row("loss of all test texts, lower is better", *(f"{losses[when]:.3f}" for when in scores))
    table.add_row("perplexity", *(f"{math.exp(losses[when]):.2f}" for when in scores))
    for field_name, title in SCORES.items():
        values = [getattr(found, field_name) for found in scores.values()]
        table.add_row(f"{title}, higher is better", *("–" if value is None else f"{value:.2f}" for value in values))
    console.print(table)
    for note in dict.fromkeys(note for found in scores.values() for note in found.notes):
        console.print(f"[yellow]{escape(note)}.[/]", highlight=False, soft_wrap=True)

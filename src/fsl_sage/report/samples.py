"""What a fine-tuned language model writes, beside what it was to say and what people wrote; and how that scores."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fsl_sage.data import Meaning, all_meanings, encode_prompts
from fsl_sage.errors import InputError
from fsl_sage.records.files import write_bytes, write_json
from fsl_sage.report.trained import Trained, load_trained
from fsl_sage.text import SCORES, Decoding, Scores, generate, score

SHOWN = 5
"""Samples that are shown unless a number is given."""
SCORED = 100
"""Meaning representations that are scored unless a number is given."""
REFERENCES_SHOWN = 3


@dataclass(frozen=True)
class SampleOptions:
    """What to generate, and how to search."""

    count: int | None = None
    """Meaning representations, evenly spaced over the file (5 if not given; 100 with --scores)."""
    split: Literal["test", "dev"] = "test"
    """The part of the data set that they are from: the run's test texts, or the whole of the dev file."""
    scores: bool = False
    """Also generate with the model as it was before training, score both, and write samples.jsonl and scores.json."""
    batch_size: int = 8
    """Meaning representations at a time."""
    decoding: Decoding = field(default_factory=Decoding)


@dataclass(frozen=True)
class Sample:
    """A meaning representation, what people wrote for it, and what the model writes."""

    meaning: str
    references: tuple[str, ...]
    generated: str
    before: str | None = None
    """What the model wrote before it was trained; None if it was not asked."""


def make_samples(console: Console, directory: Path, options: SampleOptions) -> list[Sample]:
    """Generate with the model of a finished run, and with --scores also with the model that it started from."""
    trained = load_trained(directory)
    meanings = trained.test if options.split == "test" else all_meanings(trained.config.data.dir, "dev")
    usual = min(SCORED if options.scores else SHOWN, len(meanings))
    chosen = evenly_spaced(meanings, usual if options.count is None else options.count)
    generated = _generate(console, trained, chosen, options, "generating")
    before: Sequence[str | None] = [None] * len(chosen)
    if options.scores:
        before = _generate(console, load_trained(directory, adapter=False), chosen, options, "before training")
    return [
        Sample(described.meaning, described.references, text, earlier)
        for described, text, earlier in zip(chosen, generated, before, strict=True)
    ]


def evenly_spaced(meanings: Sequence[Meaning], count: int) -> list[Meaning]:
    """So many of them, spread over the whole: the files are sorted by restaurant."""
    if not 1 <= count <= len(meanings):
        raise InputError(f"--count {count} is not possible: there are {len(meanings)} meaning representations.")
    return [meanings[place * len(meanings) // count] for place in range(count)]


def _generate(
    console: Console, trained: Trained, chosen: Sequence[Meaning], options: SampleOptions, what: str
) -> list[str]:
    prompts = encode_prompts(trained.tokenizer, [described.meaning for described in chosen])
    with _bar(what, len(chosen), console) as progress:
        return generate(
            trained.model,
            trained.tokenizer,
            prompts,
            options.decoding,
            batch_size=options.batch_size,
            progress=progress,
        )


@contextmanager
def _bar(what: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


# -- scores ------------------------------------------------------------------------------------------------------------


def score_samples(samples: Sequence[Sample]) -> dict[str, Scores]:
    """The scores of what was written before training, and after."""
    references = [sample.references for sample in samples]
    before = [sample.before or "" for sample in samples]
    return {"before": score(before, references), "after": score([sample.generated for sample in samples], references)}


def write_samples(
    directory: Path,
    samples: Sequence[Sample],
    scores: dict[str, Scores],
    losses: dict[str, float],
    options: SampleOptions,
) -> None:
    """samples.jsonl, one object for each meaning representation, and scores.json with the loss of all test texts."""
    lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    write_bytes(directory / "samples.jsonl", "".join(lines).encode())
    made_by = {"split": options.split, "meanings": len(samples), "decoding": asdict(options.decoding)}
    found = {when: {"test_loss": losses[when], **asdict(scores[when])} for when in scores}
    write_json(directory / "scores.json", made_by | found)


# -- in the terminal ---------------------------------------------------------------------------------------------------


def print_samples(console: Console, samples: Sequence[Sample]) -> None:
    """Each with its meaning representation, the references and what was generated."""
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
    """Before and after, and what differs from the usual way of scoring."""
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

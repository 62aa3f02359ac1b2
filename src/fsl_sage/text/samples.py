"""Samples of a fine-tuned language model: what it writes, what people wrote for the same meaning, and the scores."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from fsl_sage.errors import InputError
from fsl_sage.problems.texts.e2e import Meaning, all_meanings, encode_prompts
from fsl_sage.records.files import write_bytes, write_json
from fsl_sage.text.generate import Decoding, generate
from fsl_sage.text.scores import Scores, score
from fsl_sage.text.trained import Trained, load_trained

SHOWN = 5
"""Samples that are shown unless a number is given."""
SCORED = 100
"""Meaning representations that are scored unless a number is given."""
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Given a title and a total, a context whose value is told how many are done."""


def no_progress(title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Shows nothing."""
    return nullcontext(lambda done: None)


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


def make_samples(directory: Path, options: SampleOptions, progress: Progress = no_progress) -> list[Sample]:
    """Generate with the model of a finished run, and with `scores` also with the model that it started from.

    Args:
        directory: The directory of a finished run on texts.
        options: What to generate, and how to search.
        progress: Shows how far the generation is.
    """
    trained = load_trained(directory)
    meanings = trained.test if options.split == "test" else all_meanings(trained.config.data.dir, "dev")
    usual = min(SCORED if options.scores else SHOWN, len(meanings))
    chosen = evenly_spaced(meanings, usual if options.count is None else options.count)
    generated = _generate(trained, chosen, options, progress("generating", len(chosen)))
    before: Sequence[str | None] = [None] * len(chosen)
    if options.scores:
        untrained = load_trained(directory, adapter=False)
        before = _generate(untrained, chosen, options, progress("before training", len(chosen)))
    return [
        Sample(described.meaning, described.references, text, earlier)
        for described, text, earlier in zip(chosen, generated, before, strict=True)
    ]


def evenly_spaced(meanings: Sequence[Meaning], count: int) -> list[Meaning]:
    """`count` of the meanings, spread over the whole file, which is sorted by restaurant."""
    if not 1 <= count <= len(meanings):
        raise InputError(f"--count {count} is not possible: there are {len(meanings)} meaning representations.")
    return [meanings[place * len(meanings) // count] for place in range(count)]


def _generate(
    trained: Trained,
    chosen: Sequence[Meaning],
    options: SampleOptions,
    progress: AbstractContextManager[Callable[[int], None]],
) -> list[str]:
    prompts = encode_prompts(trained.tokenizer, [described.meaning for described in chosen])
    with progress as told:
        return generate(
            trained.model,
            trained.tokenizer,
            prompts,
            options.decoding,
            batch_size=options.batch_size,
            progress=told,
        )


def score_samples(samples: Sequence[Sample]) -> dict[str, Scores]:
    """The scores of the texts generated before training and after it."""
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
    """Write samples.jsonl, one object for each meaning, and scores.json, with the loss of all test texts."""
    lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    write_bytes(directory / "samples.jsonl", "".join(lines).encode())
    made_by = {"split": options.split, "meanings": len(samples), "decoding": asdict(options.decoding)}
    found = {when: {"test_loss": losses[when], **asdict(scores[when])} for when in scores}
    write_json(directory / "scores.json", made_by | found)

"""The E2E NLG challenge (Novikova et al., 2017): from a meaning representation of a restaurant to a sentence on it.

The official files, trainset.csv and testset_w_refs.csv, are read from the data directory or from its folder e2e.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsl_sage.config.directories import data_directory
from fsl_sage.errors import InputError
from fsl_sage.problems.sampling import subset
from fsl_sage.problems.texts.texts import TextData, Texts
from fsl_sage.problems.texts.tokens import encode, load_tokenizer
from fsl_sage.reading import UTF_8

FILES = {"training": "trainset.csv", "test": "testset_w_refs.csv", "dev": "devset.csv"}
NEEDED = (FILES["training"], FILES["test"])
"""The files without which no run is possible."""
LEAST = {"training": 2, "test": 1}


@dataclass(frozen=True)
class Row:
    """A line of a file."""

    meaning: str
    text: str

    @property
    def restaurant(self) -> str:
        """Which restaurant it is about."""
        found = re.search(r"name\[(.*?)\]", self.meaning)
        return found[1] if found else ""


@dataclass(frozen=True)
class Meaning:
    """A meaning representation with all sentences that people wrote for it."""

    meaning: str
    references: tuple[str, ...]


def find_e2e(directory: Path | None) -> Path | None:
    """The folder that holds the official files, if there is one."""
    given = data_directory(directory)
    return next((path for path in (given, given / "e2e") if all((path / file).is_file() for file in NEEDED)), None)


def read_rows(directory: Path | None, kind: str) -> list[Row]:
    """All lines of the training, the test or the dev file."""
    found = find_e2e(directory)
    if found is None:
        raise InputError(
            f"e2e is not in {data_directory(directory)}: put the official {' and '.join(NEEDED)} there, or "
            "give the folder that holds them by --data.dir or FSL_SAGE_DATA"
        )
    path = found / FILES[kind]
    try:
        with open(path, newline="", encoding=UTF_8) as file:
            rows = [Row(line["mr"], line["ref"]) for line in csv.DictReader(file)]
    except FileNotFoundError:
        raise InputError(f"There is no {path}: put the official {path.name} there.") from None
    except (KeyError, UnicodeDecodeError, OSError, csv.Error) as error:
        raise InputError(f"{path} is not a file of E2E with the columns mr and ref: {error}") from None
    if not all(row.meaning and row.text for row in rows):
        raise InputError(f"{path} has a line without a meaning representation or without a text")
    return rows


def choose_rows(rows: Sequence[Row], count: int | None, kind: str, seed: int) -> list[Row]:
    """`count` of the rows, balanced over the restaurants; all if that is None."""
    if count is None:
        return list(rows)
    _, labels = np.unique([row.restaurant for row in rows], return_inverse=True)
    return [rows[place] for place in subset(labels, count, LEAST[kind], f"{kind} texts", None, seed)]


def load_e2e(
    directory: Path | None,
    tokenizer: Path,
    *,
    longest: int = 512,
    train_texts: int | None = None,
    test_texts: int | None = None,
    seed: int = 0,
) -> TextData:
    """The texts as tokens. `longest` is the number of tokens after which they are cut off."""
    train, test = (
        choose_rows(read_rows(directory, kind), count, kind, seed)
        for kind, count in (("training", train_texts), ("test", test_texts))
    )
    restaurants = sorted({row.restaurant for row in (*train, *test)})
    words = load_tokenizer(tokenizer)
    return TextData(
        "e2e",
        _tokenise(words, train, restaurants),
        _tokenise(words, test, restaurants),
        classes=tuple(restaurants),
        longest=longest,
        vocabulary=len(words),
    )


def held_out_meanings(directory: Path | None, test_texts: int | None, seed: int) -> list[Meaning]:
    """The distinct meaning representations among a run's test texts, with all their references in the whole file."""
    rows = read_rows(directory, "test")
    chosen = {row.meaning for row in choose_rows(rows, test_texts, "test", seed)}
    return [described for described in _grouped(rows) if described.meaning in chosen]


def all_meanings(directory: Path | None, kind: str) -> list[Meaning]:
    """The distinct meaning representations of a whole file, with all their references."""
    return _grouped(read_rows(directory, kind))


def _grouped(rows: Sequence[Row]) -> list[Meaning]:
    references: dict[str, list[str]] = {}
    for row in rows:
        references.setdefault(row.meaning, []).append(row.text)
    return [Meaning(meaning, tuple(texts)) for meaning, texts in references.items()]


def encode_prompts(tokenizer: Any, meanings: Sequence[str]) -> list[list[int]]:
    """The prompts that stand before the texts, as tokens: the meaning representation and a mark."""
    return encode(tokenizer, [f"{meaning} ||" for meaning in meanings], special=True)


def _tokenise(tokenizer: Any, rows: Sequence[Row], restaurants: Sequence[str]) -> Texts:
    distinct = list(dict.fromkeys(row.meaning for row in rows))
    prompts = dict(zip(distinct, encode_prompts(tokenizer, distinct), strict=True))
    completions = encode(tokenizer, [f" {row.text}" for row in rows], special=False)
    number = {name: place for place, name in enumerate(restaurants)}
    return Texts.of(
        [prompts[row.meaning] for row in rows],
        [[*completion, tokenizer.eos_token_id] for completion in completions],
        torch.tensor([number[row.restaurant] for row in rows]),
    )

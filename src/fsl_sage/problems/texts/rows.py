"""Texts of the user's own as they are in their files: rows of two columns."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.problems.sampling import stratified_indices, subset
from fsl_sage.problems.saved import open_saved
from fsl_sage.reading import UTF_8, short
from fsl_sage.seeding import numpy_generator

Kind = Literal["prompts", "labels"]
COLUMNS: dict[Kind, tuple[str, str]] = {"prompts": ("prompt", "completion"), "labels": ("text", "label")}
"""What a row must have: a prompt and the completion to be learnt, or a text and the label to be recognised."""
ACCEPTED = " or ".join(" and ".join(columns) for columns in COLUMNS.values())
LONGEST_LINE = 2**24
"""Characters of a line of JSON."""


@dataclass(frozen=True)
class Row:
    """A prompt with its completion, or a text with its label."""

    text: str
    answer: Any
    place: str
    """The file and the line, for errors."""


@dataclass(frozen=True)
class Rows:
    """A training and a test set."""

    name: str
    kind: Kind
    train: list[Row]
    test: list[Row]
    names: tuple[str, ...] = ()
    """The names of the labels 0, 1, …, where they have some."""


def kind_of(columns: Sequence[str], place: str) -> Kind:
    """What the columns of a set are meant for."""
    for kind, wanted in COLUMNS.items():
        if set(wanted) <= set(columns):
            return kind
    raise InputError(f"{place} has {short(', '.join(map(str, columns))) or 'no fields'}: give {ACCEPTED}.")


def make_row(kind: Kind, values: dict[str, Any], place: str) -> Row:
    """A row of these values, checked."""
    first, second = COLUMNS[kind]
    for field in (first, second):
        if field not in values:
            raise InputError(f"{place} has no '{field}': every line needs {first} and {second}.")
    text, answer = values[first], values[second]
    if not _is_text(text) or (kind == "labels" and not text.strip()):
        raise InputError(f"'{first}' in {place} is {short(ascii(text), 40)}: give a text.")
    if kind == "prompts" and (not _is_text(answer) or not answer.strip()):
        raise InputError(f"'{second}' in {place} is {short(ascii(answer), 40)}: give a text.")
    if kind == "labels" and (not (_is_text(answer) or type(answer) is int) or answer == ""):
        raise InputError(f"'{second}' in {place} is {short(ascii(answer), 40)}: give a text or a whole number.")
    return Row(text, answer, place)


def _is_text(value: object) -> bool:
    """Whether it is a text that can be written down: JSON can hold halves of a letter, which no tokenizer takes."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def read_jsonl(path: Path, test_fraction: float) -> Rows:
    """The rows of a file, divided into two sets, or of a folder with train.jsonl and test.jsonl."""
    name = f"jsonl:{path}"
    if not path.is_dir():
        return divided(name, *_read(path), test_fraction, path)
    kind, train = _read(path / "train.jsonl")
    if not (path / "test.jsonl").is_file():
        return divided(name, kind, train, test_fraction, path)
    test_kind, test = _read(path / "test.jsonl")
    if test_kind != kind:
        raise InputError(f"{test[0].place} has other columns than {train[0].place}: both need {ACCEPTED}.")
    return Rows(name, kind, train, test)


def jsonl_kind(path: Path) -> Kind:
    """What the columns of the first row are meant for."""
    if path.is_dir():
        path = next(
            (path / name for name in ("train.jsonl", "test.jsonl") if (path / name).is_file()), path / "train.jsonl"
        )
    return next(_lines(path))[0]


def read_all(path: Path) -> tuple[Kind, list[Row]]:
    """All rows of a file, or of the .jsonl files of a folder in the order of their names."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"There is no .jsonl file in {path}: give a line of JSON for each text.")
    found = [_read(file) for file in files]
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1:
        raise InputError(f"The files in {path} have different columns: all need {ACCEPTED}.")
    return found[0][0], [row for _, rows in found for row in rows]


def write_jsonl(path: Path, kind: Kind, rows: Sequence[Row]) -> None:
    """The rows in a file that `read_all` reads."""
    first, second = COLUMNS[kind]
    lines = (json.dumps({first: row.text, second: row.answer}, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_saved(path: Path, test_fraction: float) -> Rows:
    """The rows of a directory of the package `datasets`."""
    saved = open_saved(path)
    kind = saved_kind(path)
    first, second = COLUMNS[kind]

    def rows(table: Any, split: str) -> list[Row]:
        pairs = zip(table[first], table[second], strict=True)
        return [
            make_row(kind, {first: text, second: answer}, saved.place(split, number))
            for number, (text, answer) in enumerate(pairs)
        ]

    names, train = saved.label_names, rows(saved.train, "train")
    if saved.test is None:
        return divided(f"datasets:{path}", kind, train, test_fraction, path, names)
    return Rows(f"datasets:{path}", kind, train, rows(saved.test, "test"), names)


def saved_kind(path: Path) -> Kind:
    """What the columns of a directory of `datasets` are meant for."""
    return kind_of(open_saved(path).columns, str(path))


def _read(file: Path) -> tuple[Kind, list[Row]]:
    rows, kinds = [], []
    for kind, row in _lines(file):
        kinds.append(kind)
        rows.append(row)
    return kinds[0], rows


def _lines(file: Path) -> Any:
    """The kind of the file and its rows, one by one."""
    kind: Kind | None = None
    try:
        with open(file, encoding=UTF_8) as lines:
            # So much at a time: a file may be one line of gigabytes.
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), ""), start=1):
                if line.strip():
                    place = f"line {number} of {file}"
                    values = _object(line, place)
                    kind = kind or kind_of(list(values), place)
                    yield kind, make_row(kind, values, place)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not a text in UTF-8.") from None
    if kind is None:
        raise InputError(f"{file} is empty: give a line of JSON for each text.")


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        if len(line) > LONGEST_LINE:
            raise InputError(f"{place} has more than {LONGEST_LINE:,} characters: give shorter texts.")
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{place} is not JSON: {short(error)}.") from None
    if not isinstance(values, dict):
        raise InputError(f'{place} is not a JSON object: write {{"prompt": "…", "completion": "…"}} or {ACCEPTED}.')
    return values


def divided(
    name: str, kind: Kind, rows: list[Row], test_fraction: float, origin: object, names: tuple[str, ...] = ()
) -> Rows:
    """The rows in two sets. Nothing but the rows decides which are for testing, whatever the seed of a run."""
    count = round(len(rows) * test_fraction)
    if not 1 <= count <= len(rows) - 2:
        raise InputError(f"{origin} has {len(rows)} texts: a test fraction of {test_fraction} leaves too few on a side")
    chosen = set(stratified_indices(_groups(kind, rows), count, numpy_generator(0, "test split")).tolist())
    train = [row for place, row in enumerate(rows) if place not in chosen]
    return Rows(name, kind, train, [rows[place] for place in sorted(chosen)], names)


def choose(rows: Rows, config: Config) -> tuple[list[Row], list[Row]]:
    """The training rows and the test rows that a configuration asks for, balanced over their labels."""

    def chosen(found: list[Row], count: int | None, least: int, what: str) -> list[Row]:
        if count is None:
            return found
        drawn = subset(_groups(rows.kind, found), count, least, what, rows.name, config.seed)
        return [found[place] for place in drawn]

    return (
        chosen(rows.train, config.data.train_images, 2, "training texts"),
        chosen(rows.test, config.data.test_images, 1, "test texts"),
    )


def chosen_rows(rows: Rows, config: Config) -> Rows:
    """As many of both sets as the configuration asks for."""
    train, test = choose(rows, config)
    return replace(rows, train=train, test=test)


def _groups(kind: Kind, rows: Sequence[Row]) -> np.ndarray:
    if kind == "prompts":
        return np.zeros(len(rows), dtype=np.int64)
    return np.unique([str(row.answer) for row in rows], return_inverse=True)[1]


def label_names(rows: Rows) -> tuple[str, ...]:
    """The names of the classes in the order of their labels; refuses labels that are out of range, or new in a test.

    Labels that are texts are sorted. Whole numbers are labels already: 0 to C - 1 without gaps.
    """
    first: dict[Any, Row] = {}
    for row in rows.train:
        first.setdefault(row.answer, row)
    if len({isinstance(label, str) for label in first}) > 1:
        text, number = (next(r for k, r in first.items() if isinstance(k, str) is b) for b in (True, False))
        raise InputError(f"The label in {text.place} is a text and the one in {number.place} a number: give one kind.")
    if len(first) < 2:
        raise InputError(f"All training texts of {rows.name} have the label {next(iter(first))}: give two classes.")
    for row in rows.test:
        if row.answer not in first:
            raise InputError(
                f"The test set has the label {short(repr(row.answer), 40)} in {row.place}, and no training text has it"
                ": give training texts of this class, or leave it out."
            )
    if isinstance(next(iter(first)), str):
        return tuple(sorted(first))
    count = len(rows.names) or len(first)
    for label, row in first.items():
        if not 0 <= label < count:
            raise InputError(
                f"The label {short(label, 40)} in {row.place} is out of range: the training texts have {count} classes,"
                f" so number them 0 to {count - 1} without gaps."
            )
    return rows.names or tuple(str(label) for label in range(count))

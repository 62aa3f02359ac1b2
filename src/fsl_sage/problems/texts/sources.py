"""Where texts come from, and what they are meant for: a language model that writes, or a classifier."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fsl_sage.config import Config, DataConfig, OptimizerConfig
from fsl_sage.config.directories import data_directory
from fsl_sage.models import tokenizer_path
from fsl_sage.problems.base import Problem
from fsl_sage.problems.download import stored
from fsl_sage.problems.saved import open_saved
from fsl_sage.problems.texts.imdb import IMDB, find_imdb, obtain_imdb
from fsl_sage.problems.texts.labelled import LabelledSizes, LabelledTextProblem, labelled_shapes, tokenise_labelled
from fsl_sage.problems.texts.problem import (
    TextProblem,
    known_text_sizes,
    load_prompts,
    load_text_problem,
    text_defaults,
    tokenizer_of,
)
from fsl_sage.problems.texts.rows import Kind, Rows, jsonl_kind, read_jsonl, read_saved, saved_kind
from fsl_sage.problems.texts.texts import KNOWN_TEXTS
from fsl_sage.problems.texts.tokens import load_tokenizer

IMDB_SIZES = (25_041, 24_959)
"""Training and test reviews."""


def kind_of_texts(name: str) -> Kind | None:
    """What the texts that --data.name names are meant for; None if it names no texts."""
    if name in KNOWN_TEXTS:
        return "prompts"
    if name == IMDB:
        return "labels"
    if name.startswith("jsonl:"):
        return jsonl_kind(_path(name))
    if name.startswith("datasets:") and open_saved(_path(name)).image_column is None:
        return saved_kind(_path(name))
    return None


def load_texts(config: Config) -> Problem:
    """The texts that --data.name names, in the tokens of the model."""
    if config.data.name in KNOWN_TEXTS:
        return load_text_problem(config)
    rows = rows_of(config)
    return load_prompts(rows, config) if rows.kind == "prompts" else _labelled(rows, config)


def known_texts(config: Config) -> Problem | None:
    """The shapes of a built-in set that is not here; None if it is: reading it tells more."""
    data = config.data
    if data.name in KNOWN_TEXTS:
        sizes = known_text_sizes(config)
        return None if sizes is None else TextProblem(None, sizes)
    here = find_imdb(data_directory(data.dir)) and tokenizer_path(config.model.name, data.tokenizer)
    if data.name != IMDB or here:
        return None
    train, test = (
        min(wanted or n, n) for wanted, n in zip((data.train_images, data.test_images), IMDB_SIZES, strict=True)
    )
    return labelled_shapes(LabelledSizes(train, test, 2, data.sequence_length, is_bound=True), IMDB)


def fetch_imdb(directory: Path | None) -> Path:
    """Make sure that the reviews are on this machine and say where."""
    place = data_directory(directory)
    return find_imdb(place) or stored(IMDB, place, obtain_imdb)


def labelled_defaults(name: str) -> Config:
    """The defaults for texts with labels: such as one fine-tunes an encoder with."""
    optimizer = OptimizerConfig("adamw", lr=5e-5, weight_decay=0.01, schedule="linear", warmup=0.1, decay=0)
    return Config(batch_size=16, data=DataConfig(name=name), optimizer=optimizer)


def defaults_of_texts(name: str) -> Config:
    """The defaults for a set of texts, by what it is meant for; for other data those of every run."""
    kind = kind_of_texts(name)
    if kind is None:
        return Config(data=DataConfig(name=name))
    return text_defaults(name) if kind == "prompts" else labelled_defaults(name)


def rows_of(config: Config) -> Rows:
    """The rows of texts of one's own, and of imdb."""
    name, fraction = config.data.name, config.data.test_fraction
    path = fetch_imdb(config.data.dir) if name == IMDB else _path(name)
    return _read(path, fraction, name, _versions(path))


def _versions(path: Path) -> tuple[tuple[int, int], ...]:
    """When each file of a set was last changed, and its size: what was read before that must be read again."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return tuple((found.st_mtime_ns, found.st_size) for found in (file.stat() for file in files if file.exists()))


@lru_cache(maxsize=1)
def _read(path: Path, fraction: float, name: str, versions: tuple[tuple[int, int], ...]) -> Rows:
    read = read_saved(path, fraction) if name.startswith("datasets:") else read_jsonl(path, fraction)
    return replace(read, name=name)


def _path(name: str) -> Path:
    return Path(name.partition(":")[2]).expanduser()


def are_cut(config: Config) -> bool:
    """Whether longer texts are cut off, and not refused."""
    wish = config.data.long_texts
    return wish == "cut" or (wish is None and config.data.name in (IMDB, *KNOWN_TEXTS))


def _labelled(rows: Rows, config: Config) -> LabelledTextProblem:
    tokenizer = load_tokenizer(tokenizer_of(config), writes=False)
    data = tokenise_labelled(rows, tokenizer, config, cut=are_cut(config))
    return LabelledTextProblem(data, data.sizes)

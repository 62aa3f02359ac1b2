"""Texts that are not all in one place: those of a site, and the test texts of the server.

Prompts, texts and tokenizers stay where they are. All must count tokens in the same way, so the vocabulary is agreed
on, and how long a text may be.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.problems.base import Problem
from fsl_sage.problems.texts.e2e import choose_rows, read_rows
from fsl_sage.problems.texts.labelled import (
    LabelledData,
    LabelledSizes,
    LabelledTextProblem,
    labelled_tokens,
    padding_of,
)
from fsl_sage.problems.texts.problem import TextProblem, prompt_tokens, tokenizer_of
from fsl_sage.problems.texts.rows import Row, Rows, chosen_rows, label_names, read_all, write_jsonl
from fsl_sage.problems.texts.sources import are_cut, kind_of_texts, load_texts, rows_of
from fsl_sage.problems.texts.texts import KNOWN_TEXTS, TextData, TextSizes
from fsl_sage.problems.texts.tokens import load_tokenizer


@dataclass(frozen=True)
class TextTerms:
    """What all holders of texts must agree on."""

    kind: str = ""
    """prompts, with the completions that are learnt; labels, of texts that are classified; empty for no texts."""
    longest: int = 0
    """The greatest number of tokens of a text; longer ones are cut off or refused, as --data.long-texts says."""
    vocabulary: int = 0
    """The number of tokens."""
    words: str = ""
    """A fingerprint of the vocabulary: which token has which number."""
    padding: int = 0
    """The token that stands behind the end of a text with a label."""

    def check(self, classes: Sequence[str]) -> None:
        """Refuse what is not a problem."""
        if self.kind not in ("prompts", "labels") or self.longest < 2 or self.vocabulary < 1 or not self.words:
            raise InputError("The agreement needs the kind of the texts, their longest one and the vocabulary.")
        if self.kind == "labels" and len(classes) < 2:
            raise InputError("The agreement needs the names of at least two classes.")


def agree_on_texts(config: Config, *, at_sites: bool) -> tuple[TextTerms, tuple[str, ...], list[list[Row]]]:
    """The terms, the classes, and the clients' shares of the set that the configuration names.

    With `at_sites` the training texts are at the sites, and there are no shares.
    """
    kind = kind_of_texts(config.data.name)
    assert kind is not None
    words = load_tokenizer(tokenizer_of(config), writes=kind == "prompts")
    classes: tuple[str, ...] = ()
    longest, shares = config.data.sequence_length, []
    if at_sites:
        rows = _server_rows(config)
        classes = label_names(replace(rows, train=rows.test)) if kind == "labels" else ()
    else:
        problem = load_texts(config)
        chosen = _chosen(config)
        shares = [[chosen.train[place] for place in indices.tolist()] for indices in problem.divide(config)]
        if isinstance(problem, LabelledTextProblem):
            classes, longest = problem.classes, problem.length
    return TextTerms(kind, longest, len(words), fingerprint(words), padding_of(words)), classes, shares


def load_site_texts(
    path: Path, config: Config, terms: TextTerms, classes: Sequence[str], tokenizer: Path | None
) -> Problem:
    """A site's training texts: a .jsonl file, or a folder of them.

    Args:
        path: Where they are.
        config: Says what becomes of texts that are too long.
        terms: What was agreed on.
        classes: The names of the classes, of texts with labels.
        tokenizer: The site's own directory of the tokenizer.
    """
    kind, rows = read_all(path)
    if kind != terms.kind:
        raise InputError(f"The texts in {path} are {kind}, not {terms.kind} as agreed.")
    if tokenizer is None:
        raise InputError("""The SuperNode needs the directory of its tokenizer: --node-config '… tokenizer="DIR"'.""")
    # A site never asks for a test batch.
    return _as_agreed(Rows(str(path), kind, rows, rows[:1]), config, terms, classes, tokenizer)


def load_server_texts(config: Config, terms: TextTerms, classes: Sequence[str]) -> Problem:
    """The server's problem: the test texts of the set that the configuration names."""
    rows = _server_rows(config)
    # The server never asks for a training batch.
    return _as_agreed(replace(rows, train=rows.test[:1]), config, terms, classes, tokenizer_of(config))


def text_shapes(terms: TextTerms, examples: int, classes: Sequence[str]) -> Problem:
    """Texts of which only the terms are known."""
    if terms.kind == "prompts":
        return TextProblem(None, TextSizes(examples, 1, terms.longest, terms.vocabulary))
    return LabelledTextProblem(None, _sizes(terms, examples, 1, classes))


def write_texts(directory: Path, kind: str, shares: Sequence[Sequence[Row]]) -> list[Path]:
    """The texts of each client in a file of its own, as a site would have them."""
    paths = [directory / f"client-{client}.jsonl" for client in range(len(shares))]
    for path, rows in zip(paths, shares, strict=True):
        write_jsonl(path, "prompts" if kind == "prompts" else "labels", rows)
    return paths


def fingerprint(tokenizer: Any) -> str:
    """The same for two tokenizers that number the same tokens in the same way."""
    words = sorted((number, word) for word, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([words, tokenizer.eos_token_id]).encode()).hexdigest()[:16]


def _as_agreed(rows: Rows, config: Config, terms: TextTerms, classes: Sequence[str], tokenizer: Path) -> Problem:
    words = load_tokenizer(tokenizer, writes=terms.kind == "prompts")
    if (len(words), fingerprint(words)) != (terms.vocabulary, terms.words):
        raise InputError(
            f"The tokenizer in {tokenizer} has {len(words)} tokens and is not the one agreed on, which has "
            f"{terms.vocabulary}: give the directory of the same tokenizer."
        )
    cut, longest = are_cut(config), terms.longest
    if terms.kind == "prompts":
        train, test = (prompt_tokens(own, words, longest, cut=cut) for own in (rows.train, rows.test))
        data = TextData(rows.name, train, test, classes=(), longest=longest, vocabulary=len(words))
        return TextProblem(data, data.sizes)
    _refuse_other_labels([*rows.train, *rows.test], classes)
    train, test = (labelled_tokens(own, words, classes, longest, cut=cut) for own in (rows.train, rows.test))
    sizes = _sizes(terms, len(train), len(test), classes)
    return LabelledTextProblem(LabelledData(rows.name, train, test, tuple(classes), sizes), sizes)


def _sizes(terms: TextTerms, train: int, test: int, classes: Sequence[str]) -> LabelledSizes:
    return LabelledSizes(train, test, len(classes), terms.longest, terms.vocabulary, terms.padding)


def _refuse_other_labels(rows: Sequence[Row], classes: Sequence[str]) -> None:
    for row in rows:
        known = row.answer in classes if isinstance(row.answer, str) else 0 <= row.answer < len(classes)
        if not known:
            raise InputError(
                f"The label {row.answer!r} in {row.place} is none of the classes agreed on: {', '.join(classes)}."
            )


def _chosen(config: Config) -> Rows:
    """The rows of a run's texts, as they are in their files."""
    if config.data.name not in KNOWN_TEXTS:
        return chosen_rows(rows_of(config), config)
    sets = {}
    for what, count in (("training", config.data.train_images), ("test", config.data.test_images)):
        read = choose_rows(read_rows(config.data.dir, what), count, what, config.seed)
        sets[what] = [Row(f"{row.meaning} ||", f" {row.text}", config.data.name) for row in read]
    return Rows(config.data.name, "prompts", sets["training"], sets["test"])


def _server_rows(config: Config) -> Rows:
    """The test rows of the server, which may have no others: a folder with a test.jsonl alone."""
    path = Path(config.data.name.removeprefix("jsonl:")).expanduser()
    alone = config.data.name.startswith("jsonl:") and path.is_dir() and not (path / "train.jsonl").is_file()
    if not alone:
        return _chosen(config)
    kind, rows = read_all(path)
    return chosen_rows(
        Rows(config.data.name, kind, [], rows), replace(config, data=replace(config.data, train_images=None))
    )

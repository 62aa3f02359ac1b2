"""Texts as a problem: what a language model should write."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.config import AlignmentConfig, Config, DataConfig, OptimizerConfig
from fsl_sage.errors import InputError
from fsl_sage.models import make_language_model, tokenizer_path, usual_cut
from fsl_sage.problems.base import Problem
from fsl_sage.problems.texts.e2e import find_e2e, load_e2e
from fsl_sage.problems.texts.language_modelling import LanguageModelling
from fsl_sage.problems.texts.rows import Row, Rows, chosen_rows
from fsl_sage.problems.texts.texts import KNOWN_TEXTS, TextData, Texts, TextSizes, check_lengths, refuse_image_options
from fsl_sage.problems.texts.tokens import encode, load_tokenizer

SMOOTHING = 0.1
"""Label smoothing if none is given, as in the LoRA paper."""


MAX_PASSES = 8
"""Passes of an alignment over few texts: 120 steps over 90 texts, each with all of them, took most of a run's time."""


class TextProblem(Problem):
    """Prompts with completions, and a causal language model that learns the completions."""

    has_tokens = True

    @classmethod
    def accepted_partitions(cls, config: Config) -> tuple[str, ...]:
        """Only texts of E2E say what they are about."""
        return (*cls.partitions, "restaurant") if config.data.name in KNOWN_TEXTS else ("iid",)

    @classmethod
    def check(cls, config: Config) -> None:
        """There are no classes here, and no images."""
        super().check(config)
        refuse_image_options(config)
        if config.data.class_weights is not None:
            raise InputError(f"--data.class-weights is not for {config.data.name}, which has no classes: leave it out.")

    def __init__(self, data: TextData | None, sizes: TextSizes) -> None:
        """Without data only the sizes are known, and every text is taken to be as long as can be."""
        self.data = data
        self.classes = () if data is None else data.classes
        self._sizes = sizes

    @property
    def name(self) -> str:
        """As --data.name."""
        return "texts" if self.data is None else self.data.name

    @property
    def examples(self) -> int:
        """The number of training texts."""
        return self._sizes.train

    def labels(self) -> Tensor | None:
        """What each training text is about, where that is known."""
        if self.data is None:
            return torch.empty(self.examples, device="meta")
        return self.data.train.y if self.data.classes else None

    def divide(self, config: Config) -> list[Tensor]:
        """By restaurant only if the texts are there."""
        if self.data is None and config.data.partition == "restaurant":
            raise InputError("With --data.partition restaurant a run's cost depends on the texts: give --data.dir.")
        return super().divide(config)

    def make_model(self, config: Config) -> nn.Module:
        """The language model that --model.name names, with its adapters."""
        longest = 0 if self.data is None else self._longest(self.data)
        return make_language_model(config.model.name, config.lora, self._sizes.vocabulary, longest)

    def usual_cut(self, config: Config, model: nn.Module) -> str | None:
        """After the first block."""
        return usual_cut(config.model.name, model)

    def example(self, batch: int, device: torch.device | str) -> dict[str, Tensor]:
        """A few tokens, int64 [batch, L]: models take any length."""
        return self._sizes.example(batch, device)

    def largest_example(self, batch: int, device: torch.device | str) -> dict[str, Tensor]:
        """As many tokens as the longest text has; as a text may have, where the texts are not known."""
        if self.data is None:
            return self._sizes.largest_example(batch, device)
        return replace(self._sizes, longest=self._longest(self.data)).largest_example(batch, device)

    def _longest(self, data: TextData) -> int:
        """The tokens of the longest training text, as it is read."""
        return min(self._sizes.longest, int(data.train.lengths.max()))

    def make_task(self, config: Config, device: torch.device) -> LanguageModelling:
        """The completions' tokens are learnt."""
        smoothing = config.optimizer.label_smoothing
        smoothing = SMOOTHING if smoothing is None else smoothing
        sizes = self._sizes
        return LanguageModelling(
            self.data, device, longest=sizes.longest, label_smoothing=smoothing, vocabulary=sizes.vocabulary
        )


def load_text_problem(config: Config) -> TextProblem:
    """The texts of E2E in the tokens of the model."""
    data = config.data
    if data.long_texts == "refuse":
        raise InputError("--data.long-texts refuse is not for e2e, whose longer texts are cut off.")
    loaded = load_e2e(
        data.dir,
        tokenizer_of(config),
        longest=data.sequence_length,
        train_texts=data.train_images,
        test_texts=data.test_images,
        seed=config.seed,
    )
    return TextProblem(loaded, loaded.sizes)


def load_prompts(rows: Rows, config: Config) -> TextProblem:
    """Prompts and completions of one's own, in the tokens of the model."""
    words = load_tokenizer(tokenizer_of(config))
    data = tokenise_prompts(rows, words, config)
    return TextProblem(data, data.sizes)


def tokenizer_of(config: Config) -> Path:
    """The directory of the tokenizer: one's own, or the model's."""
    path = tokenizer_path(config.model.name, config.data.tokenizer)
    if path is None:
        raise InputError(
            f"--model.name {config.model.name} brings no tokenizer: give the directory of one by --data.tokenizer."
        )
    return path


def tokenise_prompts(rows: Rows, tokenizer: Any, config: Config) -> TextData:
    """The chosen rows in tokens; those that are too long are cut off or refused, as --data.long-texts says."""
    chosen, longest = chosen_rows(rows, config), config.data.sequence_length
    cut = config.data.long_texts == "cut"
    train, test = (prompt_tokens(own, tokenizer, longest, cut=cut) for own in (chosen.train, chosen.test))
    return TextData(rows.name, train, test, classes=(), longest=longest, vocabulary=len(tokenizer))


def prompt_tokens(rows: Sequence[Row], tokenizer: Any, longest: int, *, cut: bool) -> Texts:
    """Prompts and completions in tokens; unless they are cut off, those of more than `longest` tokens are refused."""
    prompts = encode(tokenizer, [row.text for row in rows], special=True)
    end = tokenizer.eos_token_id
    completions = [[*x, end] for x in encode(tokenizer, [row.answer for row in rows], special=False)]
    if not cut:
        whole = [[*prompt, *rest] for prompt, rest in zip(prompts, completions, strict=True)]
        check_lengths(whole, [row.place for row in rows], longest)
    return Texts.of(prompts, completions, torch.zeros(len(rows), dtype=torch.int64))


def known_text_sizes(config: Config) -> TextSizes | None:
    """The sizes of a built-in set whose texts are not here; None if they are: reading them tells more."""
    data = config.data
    if find_e2e(data.dir) and tokenizer_path(config.model.name, data.tokenizer):
        return None
    train, test = KNOWN_TEXTS[data.name]
    return TextSizes(min(data.train_images or train, train), min(data.test_images or test, test), data.sequence_length)


def text_defaults(name: str) -> Config:
    """The defaults for texts that a language model learns to write: those of the LoRA paper for E2E."""
    optimizer = OptimizerConfig("adamw", lr=2e-4, weight_decay=0.01, schedule="linear", warmup=0.02, decay=0)
    alignment = AlignmentConfig(max_passes=MAX_PASSES)
    return Config(batch_size=8, data=DataConfig(name=name), optimizer=optimizer, alignment=alignment)

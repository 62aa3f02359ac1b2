"""Texts as a problem: what a language model should write."""

import torch
from torch import Tensor, nn

from fsl_sage.config import AlignmentConfig, Config, DataConfig, OptimizerConfig
from fsl_sage.errors import InputError
from fsl_sage.models import make_language_model, tokenizer_path, usual_cut
from fsl_sage.problems.base import Problem
from fsl_sage.problems.texts.e2e import find_e2e, load_e2e
from fsl_sage.problems.texts.language_modelling import LanguageModelling
from fsl_sage.problems.texts.texts import KNOWN_TEXTS, TextData, TextSizes

SMOOTHING = 0.1
"""Label smoothing if none is given, as in the LoRA paper."""


MAX_PASSES = 8
"""Passes of an alignment over few texts: 120 steps over 90 texts, each with all of them, took most of a run's time."""


class TextProblem(Problem):
    """Prompts with completions, and a causal language model that learns the completions."""

    partitions = (*Problem.partitions, "restaurant")

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

    def labels(self) -> Tensor:
        """What each training text is about."""
        return torch.empty(self.examples, device="meta") if self.data is None else self.data.train.y

    def divide(self, config: Config) -> list[Tensor]:
        """By restaurant only if the texts are there."""
        if self.data is None and config.data.partition == "restaurant":
            raise InputError("With --data.partition restaurant a run's cost depends on the texts: give --data.dir.")
        return super().divide(config)

    def make_model(self, config: Config) -> nn.Module:
        """The language model that --model.name names, with its adapters."""
        return make_language_model(config.model.name, config.lora, self._sizes.vocabulary)

    def usual_cut(self, config: Config, model: nn.Module) -> str | None:
        """After the first block."""
        return usual_cut(config.model.name, model)

    def example(self, batch: int, device: torch.device | str) -> dict[str, Tensor]:
        """A few tokens, int64 [batch, L]: models take any length."""
        return self._sizes.example(batch, device)

    def largest_example(self, batch: int, device: torch.device | str) -> dict[str, Tensor]:
        """As many tokens as a text may have."""
        return self._sizes.largest_example(batch, device)

    def make_task(self, config: Config, device: torch.device) -> LanguageModelling:
        """The completions' tokens are learnt."""
        smoothing = config.optimizer.label_smoothing
        smoothing = SMOOTHING if smoothing is None else smoothing
        return LanguageModelling(self.data, device, longest=self._sizes.longest, label_smoothing=smoothing)


def load_text_problem(config: Config) -> TextProblem:
    """The texts that --data.name names, in the tokens of the model."""
    data = config.data
    tokenizer = tokenizer_path(config.model.name, data.tokenizer)
    if tokenizer is None:
        raise InputError(
            f"--model.name {config.model.name} brings no tokenizer: give the directory of one by --data.tokenizer."
        )
    loaded = load_e2e(
        data.dir,
        tokenizer,
        longest=data.sequence_length,
        train_texts=data.train_images,
        test_texts=data.test_images,
        seed=config.seed,
    )
    return TextProblem(loaded, loaded.sizes)


def known_text_sizes(config: Config) -> TextSizes | None:
    """The sizes of a built-in set whose texts are not here; None where they are, for then reading them tells more."""
    data = config.data
    if find_e2e(data.dir) and tokenizer_path(config.model.name, data.tokenizer):
        return None
    train, test = KNOWN_TEXTS[data.name]
    return TextSizes(min(data.train_images or train, train), min(data.test_images or test, test), data.sequence_length)


def text_defaults(name: str) -> Config:
    """The defaults for texts: those of the LoRA paper for E2E."""
    optimizer = OptimizerConfig("adamw", lr=2e-4, weight_decay=0.01, schedule="linear", warmup=0.02, decay=0)
    alignment = AlignmentConfig(max_passes=MAX_PASSES)
    return Config(batch_size=8, data=DataConfig(name=name), optimizer=optimizer, alignment=alignment)

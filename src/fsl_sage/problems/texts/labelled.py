"""Texts with labels as a problem: which class a text is of."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.config import Config
from fsl_sage.devices import moved
from fsl_sage.models import make_text_classifier, usual_text_cut
from fsl_sage.problems.base import Batch, Problem
from fsl_sage.problems.classification import Classes, class_weights
from fsl_sage.problems.texts.rows import Row, Rows, chosen_rows, label_names
from fsl_sage.problems.texts.texts import Texts, check_lengths, refuse_image_options
from fsl_sage.problems.texts.tokens import encode

TEST_BATCH = 50  # fixed, so that the test loss has the same bits whatever the number of workers


@dataclass(frozen=True)
class LabelledSizes:
    """The sizes of a set: all that the cost of a run needs to know of its data."""

    train: int
    test: int
    classes: int
    length: int
    """Tokens of every text in a batch, shorter ones padded."""
    vocabulary: int = 0
    """Tokens are numbers below this; 0 where that is not known."""
    padding: int = 0
    """The token that stands behind the end of a text."""
    is_bound: bool = False
    """Whether the texts are not here, and may all be shorter."""

    def example(self, batch: int, device: torch.device | str) -> dict[str, Tensor]:
        """Inputs of a classifier."""
        ones = torch.ones(batch, self.length, dtype=torch.int64, device=device)
        return {"input_ids": torch.zeros_like(ones), "attention_mask": ones}


@dataclass(frozen=True, eq=False)
class LabelledData:
    """A training and a test set, in tokens."""

    name: str
    train: Texts
    test: Texts
    classes: tuple[str, ...]
    sizes: LabelledSizes


class TextClassification(Classes):
    """Texts in, classes out. Every batch is padded to the longest text of the whole set, so all have one shape."""

    def __init__(self, data: LabelledData | None, sizes: LabelledSizes, device: torch.device, **options: Any) -> None:
        super().__init__(sizes.classes, **options)
        self.data = data
        self.sizes = sizes
        self.device = device
        self.sizes_are_bounds = sizes.is_bound

    def training_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """input_ids and attention_mask, int64 [B, L], and labels int64 [B]."""
        if self.device.type == "meta":
            return Batch(self.sizes.example(len(indices), "meta"), {"labels": torch.empty_like(indices, device="meta")})
        assert self.data is not None
        return self._batch(self.data.train, indices)

    def test_batches(self) -> int:
        """The number of batches of TEST_BATCH texts."""
        return -(-self.sizes.test // TEST_BATCH)

    def test_batch(self, index: int) -> Batch:
        """Test texts in their order."""
        assert self.data is not None
        chosen = torch.arange(index * TEST_BATCH, min((index + 1) * TEST_BATCH, self.sizes.test))
        return self._batch(self.data.test, chosen)

    def _batch(self, texts: Texts, indices: Tensor) -> Batch:
        tokens, mask = texts.padded(indices, self.sizes.length, self.sizes.padding)
        inputs = {"input_ids": moved(tokens, self.device), "attention_mask": moved(mask, self.device)}
        return Batch(inputs, {"labels": moved(texts.y[indices], self.device)})


class LabelledTextProblem(Problem):
    """Texts with labels, and a sequence classifier of transformers that tells the classes apart."""

    has_tokens = True

    def __init__(self, data: LabelledData | None, sizes: LabelledSizes, name: str = "texts") -> None:
        """Without data only the sizes are known."""
        self.data = data
        self.classes = ("",) * sizes.classes if data is None else data.classes
        self._sizes = sizes
        self._name = name if data is None else data.name

    @classmethod
    def check(cls, config: Config) -> None:
        """There are no images here."""
        super().check(config)
        refuse_image_options(config)

    @property
    def name(self) -> str:
        """As --data.name."""
        return self._name

    @property
    def length(self) -> int:
        """The number of tokens to which every text is padded."""
        return self._sizes.length

    @property
    def examples(self) -> int:
        """The number of training texts."""
        return self._sizes.train

    def labels(self) -> Tensor:
        """The classes of the training texts."""
        return torch.empty(self.examples, device="meta") if self.data is None else self.data.train.y

    def make_model(self, config: Config) -> nn.Module:
        """The sequence classifier that --model.name names."""
        sizes = self._sizes
        return make_text_classifier(config.model.name, sizes.classes, sizes.vocabulary, sizes.length, sizes.padding)

    def usual_cut(self, config: Config, model: nn.Module) -> str | None:
        """After the first block."""
        return usual_text_cut(model)

    def example(self, batch: int, device: torch.device | str) -> dict[str, Tensor]:
        """Tokens and their mask, int64 [batch, L]."""
        return self._sizes.example(batch, device)

    def make_task(self, config: Config, device: torch.device) -> TextClassification:
        """Classification."""
        return TextClassification(
            self.data,
            self._sizes,
            device,
            label_smoothing=config.optimizer.label_smoothing or 0.0,
            class_weights=class_weights(config.data.class_weights, self.labels(), self._sizes.classes),
        )


@lru_cache(maxsize=16)  # the same problem for the same sizes, so that what is made for it can be kept, too
def labelled_shapes(sizes: LabelledSizes, name: str) -> LabelledTextProblem:
    """Texts of which only the sizes are known."""
    return LabelledTextProblem(None, sizes, name)


def tokenise_labelled(rows: Rows, tokenizer: Any, config: Config, *, cut: bool) -> LabelledData:
    """The chosen texts of a set in tokens.

    Args:
        rows: All texts.
        tokenizer: The model's own, of transformers.
        config: Says how many texts are taken, and how long they may be.
        cut: Whether longer texts are cut off; else they are refused.
    """
    chosen, classes, longest = chosen_rows(rows, config), label_names(rows), config.data.sequence_length
    train, test = (labelled_tokens(own, tokenizer, classes, longest, cut=cut) for own in (chosen.train, chosen.test))
    length = int(max(train.lengths.max(), test.lengths.max()))
    sizes = LabelledSizes(len(train), len(test), len(classes), length, len(tokenizer), padding_of(tokenizer))
    return LabelledData(rows.name, train, test, classes, sizes)


def labelled_tokens(rows: Sequence[Row], tokenizer: Any, classes: Sequence[str], longest: int, *, cut: bool) -> Texts:
    """Texts in tokens, with their labels as numbers; those of more than `longest` tokens are cut off or refused."""
    number = {name: place for place, name in enumerate(classes)}
    tokens = encode(tokenizer, [row.text for row in rows], special=True, longest=longest if cut else None)
    check_lengths(tokens, [row.place for row in rows], longest)
    return Texts.of([[]] * len(tokens), tokens, torch.tensor([_label(row, number) for row in rows]))


def padding_of(tokenizer: Any) -> int:
    """The token that stands behind the end of a text."""
    return next((x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None), 0)


def _label(row: Row, number: dict[str, int]) -> int:
    return number[row.answer] if isinstance(row.answer, str) else int(row.answer)

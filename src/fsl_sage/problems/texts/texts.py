"""Texts in memory: the tokens of a whole set in one flat tensor, and what a set says about itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fsl_sage.config import Config, option
from fsl_sage.errors import InputError


@dataclass(frozen=True, eq=False)
class Texts:
    """Tokenised texts, each a prompt and its completion: text i is `tokens[offsets[i]:offsets[i + 1]]`.

    `tokens` int32 [sum of lengths], `offsets` int64 [N + 1], `prompts` int64 [N] (how many of its tokens are the
    prompt, which is given and not learnt), `y` int64 [N] (what the text is about: its restaurant).
    """

    tokens: Tensor
    offsets: Tensor
    prompts: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @cached_property  # asked for with every batch
    def lengths(self) -> Tensor:
        """The number of tokens of each text, int64 [N]."""
        return self.offsets[1:] - self.offsets[:-1]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], y: Tensor) -> "Texts":
        """From token lists, once; afterwards nothing goes text by text."""
        lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
        pieces = [part for pair in zip(prompts, completions, strict=True) for part in pair]
        flat = np.fromiter((token for piece in pieces for token in piece), dtype=np.int32, count=sum(lengths))
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        offsets[1:] = torch.tensor(lengths).cumsum(0)
        return cls(torch.from_numpy(flat), offsets, torch.tensor([len(prompt) for prompt in prompts]), y)

    def rows(self, indices: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """The texts at `indices`, padded on the right to the longest of them, which is cut off after `longest` tokens.

        Returns what the model reads, int64 [B, L - 1]; the tokens that follow, int32 [B, L - 1]; and which of these
        are to be learnt, bool [B, L - 1]: those of the completion. Tokens not to be learnt are 0 among those that
        follow, so that neither prompt nor padding can be read from them.
        """
        indices = indices.to(self.offsets.device)
        lengths = self.lengths[indices].clamp(max=longest)
        place = torch.arange(int(lengths.max()), device=lengths.device)
        there = place < lengths[:, None]  # [B, L]
        flat = torch.where(there, self.offsets[indices, None] + place, 0)
        tokens = self.tokens[flat].masked_fill(~there, 0)
        # Not a view of something larger: what is uploaded then takes as much memory wherever it is.
        learnt = (there & (place >= self.prompts[indices, None]))[:, 1:].contiguous()
        return tokens[:, :-1].to(torch.int64), tokens[:, 1:].masked_fill(~learnt, 0), learnt

    def most_learnt(self, count: int, longest: int) -> int:
        """The greatest number of tokens that are to be learnt in so many texts, each cut off after `longest` tokens."""
        learnt = (self.lengths.clamp(max=longest) - self.prompts.clamp(min=1)).clamp(min=0)
        return int(learnt.topk(min(count, len(learnt))).values.sum())

    def padded(self, indices: Tensor, length: int, padding: int) -> tuple[Tensor, Tensor]:
        """The texts at `indices`, of at most `length` tokens, padded on the right; and which tokens are theirs.

        Both are int64 [B, length].
        """
        lengths = self.lengths[indices]
        place = torch.arange(length)
        there = place < lengths[:, None]
        flat = torch.where(there, self.offsets[indices, None] + place, 0)
        return self.tokens[flat].long().masked_fill(~there, padding), there.long()


def check_lengths(texts: Sequence[Sequence[int]], places: Sequence[str], longest: int) -> None:
    """Refuse texts of no tokens or of more than `longest`, by the first of them."""
    for tokens, place in zip(texts, places, strict=True):
        if not tokens:
            raise InputError(
                f"The tokenizer finds no tokens in the text in {place}: give the model's own by --data.tokenizer, or "
                "leave the text out."
            )
        if len(tokens) > longest:
            raise InputError(
                f"The text in {place} has {len(tokens)} tokens, more than --data.sequence-length {longest}: give at "
                "least as many, or --data.long-texts cut."
            )


def refuse_image_options(config: Config) -> None:
    """Refuse what has no meaning for texts."""
    for name in ("augmentation", "image_size"):
        if getattr(config.data, name) is not None:
            raise InputError(f"{option(f'data.{name}')} is not for {config.data.name}, a set of texts: leave it out.")


@dataclass(frozen=True)
class TextSizes:
    """The sizes of a set: all that the cost of a run needs to know of its data."""

    train: int
    test: int
    longest: int
    """The number of tokens after which texts are cut off."""
    vocabulary: int = 0
    """Tokens are numbers below this; 0 where that is not known."""

    def example(self, batch: int, device: torch.device | str) -> dict[str, Tensor]:
        """Inputs of a language model, to see what it does. They are short, because models take any length."""
        return {"input_ids": torch.zeros(batch, min(self.longest - 1, 8), dtype=torch.int64, device=device)}

    def largest_example(self, batch: int, device: torch.device | str) -> dict[str, Tensor]:
        """Inputs as large as they can be in a run, to see what it needs."""
        return {"input_ids": torch.zeros(batch, self.longest - 1, dtype=torch.int64, device=device)}


@dataclass(frozen=True, eq=False)
class TextData:
    """A training and a test set."""

    name: str
    train: Texts
    test: Texts
    classes: tuple[str, ...]
    """The restaurants."""
    longest: int
    vocabulary: int
    """Tokens are numbers below this."""

    def __post_init__(self) -> None:
        for kind, texts in (("training", self.train), ("test", self.test)):
            if not len(texts):
                raise InputError(f"{self.name} has no {kind} texts")
            wanted = int(texts.prompts.max()) + 1
            if wanted > self.longest:
                raise InputError(
                    f"--data.sequence-length {self.longest} leaves nothing to learn of some {kind} texts of "
                    f"{self.name}, whose prompts have up to {wanted - 1} tokens: give at least {wanted}"
                )

    @property
    def sizes(self) -> TextSizes:
        """The sizes of both sets."""
        return TextSizes(len(self.train), len(self.test), self.longest, self.vocabulary)


KNOWN_TEXTS: dict[str, tuple[int, int]] = {"e2e": (42_061, 4_693)}
"""Training and test texts of the built-in sets, known without reading them."""

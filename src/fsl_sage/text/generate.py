"""Text from a causal language model by beam search: deterministic, in batches padded on the left."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.errors import InputError, MissingExtra


@dataclass(frozen=True)
class Decoding:
    """How to search; the defaults are those of the LoRA paper for E2E."""

    beams: int = 10
    """Beams of the search; 1 is greedy."""
    length_penalty: float = 0.9
    """The exponent of the length by which a beam's log-probability is divided."""
    no_repeat_ngram: int = 4
    """No n-gram of this many tokens comes twice in a text; 0 allows it."""
    max_new_tokens: int = 64
    """The longest text, in tokens."""

    def __post_init__(self) -> None:
        """Refuse what no search can do."""
        least = {"beams": 1, "no_repeat_ngram": 0, "max_new_tokens": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise InputError(f"{name} = {getattr(self, name)} is not possible: give {smallest} or more.")


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding | None = None,
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The text that the model writes after each prompt, without the prompt.

    Prompts of similar lengths share a batch, whatever their order, so that little is padded. The model is left in the
    mode, training or evaluation, in which it came.

    Args:
        model: A causal language model of transformers, bare or with peft's adapters.
        tokenizer: Its tokenizer, whose end-of-text token ends a text.
        prompts: The tokens of each prompt, at least one each.
        decoding: How to search.
        batch_size: Prompts at a time; the search holds `beams` times as many texts.
        progress: Told after each batch how many prompts are done.
    """
    decoding = decoding or Decoding()
    _check(model, tokenizer, prompts, decoding, batch_size)
    texts = [""] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(prompts), batch_size):
            places = by_length[start : start + batch_size]
            written = _write(model, tokenizer, [prompts[place] for place in places], decoding)
            for place, text in zip(places, written, strict=True):
                texts[place] = text
            progress(start + len(places))
    finally:
        model.train(was_training)
    return texts


def _check(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], decoding: Decoding, batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"a batch of {batch_size} prompts is not possible: give 1 or more.")
    if any(not len(prompt) for prompt in prompts):
        raise InputError("a prompt without tokens cannot be continued: give at least one token.")
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-text token, without which a text never ends: set its eos_token.")
    longest = max(map(len, prompts), default=0)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and longest + decoding.max_new_tokens > positions:
        raise InputError(
            f"a prompt of {longest} tokens and a text of {decoding.max_new_tokens} are more than the model's "
            f"{positions} positions: allow shorter texts."
        )


def _write(model: Any, tokenizer: Any, prompts: list[Sequence[int]], decoding: Decoding) -> list[str]:
    try:
        from transformers import GenerationConfig, LogitsProcessorList
    except ImportError:
        raise MissingExtra("generating text", "llm") from None
    device = next(model.parameters()).device
    end = int(tokenizer.eos_token_id)
    pad = end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    tokens, mask = _padded_on_the_left(prompts, pad)  # [B, longest prompt]
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        num_beams=decoding.beams,
        do_sample=False,
        length_penalty=decoding.length_penalty if decoding.beams > 1 else None,
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=end,
        pad_token_id=pad,
    )
    repeated = decoding.no_repeat_ngram
    processors = [_NoRepeat(repeated, tokens.shape[1])] if repeated else []
    with _searching_by(model, config):
        written = model.generate(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            logits_processor=LogitsProcessorList(processors),
        )  # [B, longest prompt + longest text]
    decoded = tokenizer.batch_decode(written[:, tokens.shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in decoded]


@contextmanager
def _searching_by(model: Any, config: Any) -> Iterator[None]:
    """What `config` leaves open, `generate` takes from the model's own: a penalty on repetition, for instance."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def _padded_on_the_left(prompts: list[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    tokens = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return tokens, mask


class _NoRepeat:
    """Forbids n-grams that the text has already, and not, as transformers' own option does, those of the prompt.

    With those it would forbid the very names that the text must take from the prompt.
    """

    def __init__(self, size: int, prompt_length: int) -> None:
        from transformers import NoRepeatNGramLogitsProcessor

        self.forbid = NoRepeatNGramLogitsProcessor(size)
        self.prompt_length = prompt_length

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return self.forbid(tokens[:, self.prompt_length :], logits)

"""Encoder-decoders that classify texts, such as BART and T5, in a form that can be cut.

They read a text twice: the encoder reads it as it is, and then the decoder reads it moved by one token. Here the client
reads it twice at once. What the decoder reads is embedded before the encoder starts, so the server gets embeddings and
never the tokens.
"""

import sys
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

_BY_END, _BY_LAST = "classification_head", "score"
"""The two heads of transformers: of the token that ends the text, and of the decoder's last token."""


class EncoderDecoderClassifier(nn.Module):
    """The same modules under the same names, and the same logits, [B, classes]."""

    def __init__(self, model: Any) -> None:
        """`model` is a sequence classifier of transformers, one that is an encoder-decoder."""
        super().__init__()
        self.config = model.config
        self._prefix: str = model.base_model_prefix
        self._head = _BY_END if hasattr(model, _BY_END) else _BY_LAST
        for name in (self._prefix, self._head):
            self.add_module(name, model.get_submodule(name))
        self.place = Place(model.config.eos_token_id if self._head == _BY_END else None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """From tokens and their mask, int64 [B, L] each, to logits [B, classes]."""
        model: Any = self.get_submodule(self._prefix)
        place = self.place(input_ids, attention_mask)
        read = model.get_decoder().get_input_embeddings()(moved(model, input_ids))
        x = model(input_ids=input_ids, attention_mask=attention_mask, decoder_inputs_embeds=read).last_hidden_state
        logits: Tensor = self.get_submodule(self._head)(x[torch.arange(len(place), device=x.device), place])
        return logits


class Place(nn.Module):
    """Which of the decoder's tokens the head sees. It is a module, so that what it finds can cross a cut."""

    def __init__(self, end: int | None) -> None:
        """`end` is the token that ends a text; None if the head sees the decoder's last token."""
        super().__init__()
        self.end = end

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Places in a text, int64 [B]: of the last `end`, or of the last token in a text that has none."""
        last = attention_mask.sum(1) - 1
        if self.end is None:  # the decoder reads the text one place later
            return (last + 1).clamp(max=input_ids.shape[1] - 1)
        ends = (input_ids == self.end) & (attention_mask == 1)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return torch.where(ends.any(1), (places * ends).max(1).values, last)


def moved(model: Any, input_ids: Tensor) -> Tensor:
    """What the decoder reads, int64 [B, L]: the text moved by one token, by the model's own code."""
    for name in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        if hasattr(model, name):
            tokens: Tensor = getattr(model, name)(input_ids)
            return tokens
    move = sys.modules[type(model).__module__].shift_tokens_right
    special = (getattr(model.config, key) for key in list(signature(move).parameters)[1:])  # padding, perhaps a start
    tokens = move(input_ids, *special)
    return tokens

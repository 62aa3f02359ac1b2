"""Decoders that classify texts by their last token, such as GPT-2 and Llama, in a form that can be cut.

Those of transformers look for the last token in `input_ids` behind the last block, so the texts themselves would have
to cross the cut. Here the attention mask says where a text ends. Texts are padded on the right.
"""

from typing import Any

import torch
from torch import Tensor, nn

_HEADS = {
    "ctrl": ("classifier",),
    "modernbert-decoder": ("head", "drop", "classifier"),
}
"""The modules behind the last block, where they are not a Linear called `score`."""


class LastTokenClassifier(nn.Module):
    """The same modules under the same names, and the same logits, [B, classes]."""

    def __init__(self, model: Any) -> None:
        """`model` is a sequence classifier of transformers, one that `classifies_by_last_token`."""
        super().__init__()
        self.config = model.config
        self._prefix: str = model.base_model_prefix
        self._head = _head_of(model)
        for name in (self._prefix, *self._head):
            self.add_module(name, model.get_submodule(name))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """From tokens and their mask, int64 [B, L] each, to logits [B, classes]."""
        x = self.get_submodule(self._prefix)(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        for name in self._head:
            x = self.get_submodule(name)(x)
        last = attention_mask.sum(1) - 1
        return x[torch.arange(len(last), device=x.device), last]


def classifies_by_last_token(model: nn.Module) -> bool:
    """Whether a sequence classifier of transformers is such a model."""
    return bool(_head_of(model))


def _head_of(model: Any) -> tuple[str, ...]:
    if getattr(model.config, "pooling", None) not in (None, "eos"):  # of all tokens, or of the first
        return ()
    score = ("score",) if isinstance(getattr(model, "score", None), nn.Linear) else ()
    return _HEADS.get(model.config.model_type, score)

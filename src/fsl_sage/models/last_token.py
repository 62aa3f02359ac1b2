"""Decoders that classify texts by their last token, such as GPT-2 and Llama, in a form that can be cut.

Those of transformers look for the last token in `input_ids` behind the last block, so the texts themselves would have
to cross the cut. Here the attention mask says where a text ends. Texts are padded on the right.
"""

from typing import Any

import torch
from torch import Tensor, nn


class LastTokenClassifier(nn.Module):
    """The same modules under the same names, and the same logits, [B, classes]."""

    def __init__(self, model: Any) -> None:
        """`model` is a sequence classifier of transformers with a Linear `score` behind its decoder."""
        super().__init__()
        self.config = model.config
        self._prefix: str = model.base_model_prefix
        self.add_module(self._prefix, model.base_model)
        self.score = model.score

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """From tokens and their mask, int64 [B, L] each, to logits [B, classes]."""
        decoder = self.get_submodule(self._prefix)
        logits = self.score(decoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        last = attention_mask.sum(1) - 1
        return logits[torch.arange(len(last), device=logits.device), last]


def classifies_by_last_token(model: nn.Module) -> bool:
    """Whether a sequence classifier of transformers is such a decoder."""
    return isinstance(getattr(model, "score", None), nn.Linear)

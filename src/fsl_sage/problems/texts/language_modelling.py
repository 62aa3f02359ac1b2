"""Causal language modelling: a batch is texts, the loss is the cross entropy of the tokens that are to be learnt."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsl_sage.devices import moved
from fsl_sage.problems.base import Batch, Task
from fsl_sage.problems.texts.frugal_loss import frugal_cross_entropy
from fsl_sage.problems.texts.texts import TextData

DECODERS = ("lm_head", "embed_out")
"""What models of transformers call the layer that makes logits of hidden states."""
TEST_BATCH = 16  # fixed, so that the test loss has the same bits whatever the number of workers


class LanguageModelling(Task):
    """Texts as one flat tensor of tokens; each batch is padded to its own longest text, no further.

    A target is the `labels`, int32 [B, L], the token that follows each position, and the `mask`, bool [B, L], of the
    positions that count. Both travel with an upload. Whatever stands at the other positions, prompt or padding, has
    no loss: none of it is learnt, in training or in alignment. The cut's gradients at padding are 0; at a prompt they
    are what the text's losses send back to it by attention, and auxiliaries are aligned to that.

    On the meta device a batch has shapes only: those of the given texts, or, without texts (`data` None), of texts of
    the greatest length, an upper bound.
    """

    term_dimensions = 2
    labels_are = "the tokens of every completion, which are its text, and where they stand"

    def __init__(
        self,
        data: TextData | None,
        device: torch.device,
        *,
        longest: int,
        label_smoothing: float = 0.1,
        vocabulary: int = 0,
    ) -> None:
        self.data = data
        self.vocabulary = vocabulary
        self.device = device
        self.longest = longest
        self.vocabulary = vocabulary
        self.label_smoothing = label_smoothing
        self.sizes_vary = True
        self.sizes_are_bounds = data is None
        # Texts of like length together, so that little is padding; the order is fixed by the data.
        self._test_order = data.test.lengths.argsort(stable=True) if data is not None else torch.empty(0)

    @property
    def label_values(self) -> int | None:
        """A label is a token."""
        return self.vocabulary or None

    def training_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """input_ids int64 [B, L], and what follows them."""
        if self.device.type == "meta":
            return self._shapes(indices)
        assert self.data is not None
        return self._batch(*self.data.train.rows(indices, self.longest))

    def test_batches(self) -> int:
        """The number of batches of TEST_BATCH texts."""
        return -(-len(self._test_order) // TEST_BATCH)

    def test_batch(self, index: int) -> Batch:
        """Test texts, sorted by their length."""
        assert self.data is not None
        chosen = self._test_order[index * TEST_BATCH : (index + 1) * TEST_BATCH]
        return self._batch(*self.data.test.rows(chosen, self.longest))

    def output(self, behind: nn.Module, z: Sequence[Tensor], target: Mapping[str, Tensor]) -> Any:
        """Logits [n, vocabulary] of the positions that count alone: the decoder is most of an auxiliary's work."""
        with _decoded_where(behind, target["mask"]):
            return behind(*z)

    def leaves_out(self, samples: int) -> Callable[[nn.Module], None]:
        """Decodes as many positions as can count in a batch of so many texts; all, where the texts are not known."""
        if self.data is None:
            return super().leaves_out(samples)
        terms = self.data.train.most_learnt(samples, self.longest)

        def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden, *rest = args
            rows = hidden.flatten(0, -2)
            return (rows[torch.arange(min(terms, len(rows)), device=rows.device)], *rest)

        def prepare(model: nn.Module) -> None:
            for decoder in _decoders(model):
                decoder.register_forward_pre_hook(pick)

        return prepare

    def loss(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """Mean cross entropy with label smoothing over the positions that count."""
        logits, labels = _learnt(output, target)
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def loss_once(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        """The same in less memory, where it is known to have the same bits: on the CPU."""
        logits, labels = _learnt(output, target)
        # Whoever derives from this class may have written a loss of their own.
        if logits.device.type != "cpu" or type(self).loss is not LanguageModelling.loss:
            return self.loss(output, target)
        return frugal_cross_entropy(logits, labels, self.label_smoothing)

    def terms(self, target: Mapping[str, Tensor]) -> int:
        """One term a token that counts."""
        return int(target["mask"].sum())

    def complaint(self, target: Mapping[str, Tensor]) -> str | None:
        """Tokens that do not exist, or none that counts."""
        labels, mask = target["labels"], target["mask"]
        if self.vocabulary and labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.vocabulary:
            return f"it has tokens outside 0 to {self.vocabulary - 1}"
        return None if bool(mask.any()) else "no token of it is to be learnt"

    def shorter(self) -> "LanguageModelling | None":
        """Texts of one token less."""
        if self.data is not None or self.longest <= 2:
            return None
        less = copy.copy(self)
        less.longest -= 1
        return less

    def score(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, float]:
        """Summed loss without label smoothing, tokens predicted right, number of tokens."""
        logits, labels = _learnt(output, target)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum").item(),
            "correct": float((logits.argmax(1) == labels).sum().item()),
            "count": float(len(labels)),
        }

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Over all tokens that count: mean loss, its exponential, and the fraction predicted right."""
        loss = sums["loss"] / sums["count"]
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"test_accuracy": sums["correct"] / sums["count"], "test_loss": loss, "test_perplexity": perplexity}

    def _batch(self, tokens: Tensor, labels: Tensor, mask: Tensor) -> Batch:
        target = {"labels": moved(labels, self.device), "mask": moved(mask, self.device)}
        return Batch({"input_ids": moved(tokens, self.device)}, target)

    def _shapes(self, indices: Tensor) -> Batch:
        longest = self.longest
        if self.data is not None and not indices.is_meta:  # else it is not known which texts they are
            longest = min(longest, int(self.data.train.lengths[indices].max()))
        shape = (len(indices), longest - 1)
        kinds = (torch.int64, torch.int32, torch.bool)
        return self._batch(*(torch.empty(shape, dtype=kind, device="meta") for kind in kinds))


@contextmanager
def _decoded_where(behind: nn.Module, mask: Tensor) -> Iterator[None]:
    """Within it the decoder gets the hidden states [n, width] where the mask is true, in place of [B, L, width]."""

    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        return (hidden[mask] if hidden.shape[:-1] == mask.shape else hidden, *rest)

    hooks = [decoder.register_forward_pre_hook(pick) for decoder in _decoders(behind) if not mask.is_meta]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _decoders(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in DECODERS]


def _learnt(output: Any, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the positions that count, n of all B x L: the logits [n, vocabulary], float32, and the labels [n]."""
    logits: Tensor = getattr(output, "logits", output)
    mask = target["mask"]
    if logits.dim() > 2:  # all positions were decoded
        logits = logits[mask]
    return logits if logits.dtype == torch.float64 else logits.float(), target["labels"][mask].long()

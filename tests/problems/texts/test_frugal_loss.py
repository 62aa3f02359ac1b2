"""Cross entropy in the place of the logits, against torch's own: the same bits, in less memory."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsl_sage.alignment.passes import Passes
from fsl_sage.engines.process import threads
from fsl_sage.problems.texts import frugal_loss
from fsl_sage.problems.texts.frugal_loss import IN_A_PIECE, _Rows, frugal_cross_entropy
from fsl_sage.problems.texts.language_modelling import LanguageModelling
from fsl_sage.roles.footprint import Meter

Loss = Callable[[Tensor, Tensor, float], Tensor]
CPU = torch.device("cpu")
TERMS = 73
"""Of the texts in `a_pass`."""


def usual(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)


def through_a_decoder(loss: Loss, rows: int, classes: int, smoothing: float, dtype: torch.dtype) -> list[Tensor]:
    """Loss and gradients of hidden states and decoder."""
    torch.manual_seed(rows)
    hidden = (3 * torch.randn(rows, 8, dtype=dtype)).requires_grad_()
    weight = torch.randn(classes, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(classes, (rows,))
    value = loss(F.linear(hidden, weight), labels, smoothing)
    (value * 0.7).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [value.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    ("rows", "classes", "dtype"),
    [
        (1, 50257, torch.float32),
        (43, 50257, torch.float32),  # 20 rows in a piece, and three more
        (41, 49152, torch.float64),
        (5, IN_A_PIECE, torch.float32),  # two rows in a piece
        (3000, 211, torch.float32),
        (7, 3, torch.float32),
    ],
)
def test_loss_and_gradients_have_the_bits_of_torchs_own(
    rows: int, classes: int, dtype: torch.dtype, cores: int, smoothing: float
) -> None:
    with threads(cores):
        expected = through_a_decoder(usual, rows, classes, smoothing, dtype)
        found = through_a_decoder(frugal_cross_entropy, rows, classes, smoothing, dtype)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("rows", [3, 40, 41, 43])
def test_every_row_has_its_sum_to_the_bit(rows: int) -> None:
    """In the loss the last bits of a sum over all classes may get lost."""
    logits = torch.randn(rows, 50257, generator=torch.Generator().manual_seed(rows))
    with threads(2):  # torch gives the sum of a single row to both, in two halves
        _, sums = _Rows.apply(logits, torch.zeros(rows, dtype=torch.int64))
        assert torch.equal(sums, logits.log_softmax(1).sum(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_that_does_not_count_is_left_out(smoothing: float) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([3, -100, 0, -100, 9])
    both = []
    for loss in (usual, frugal_cross_entropy):
        given = torch.randn(5, 10, generator=torch.Generator().manual_seed(1)).requires_grad_()
        value = loss(given @ torch.eye(10), labels, smoothing)
        value.backward()
        assert given.grad is not None
        both.append((value.detach(), given.grad))
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


@pytest.mark.parametrize("last", [nn.Tanh(), nn.LogSoftmax(1), nn.Flatten(), nn.Identity()])
def test_an_operation_that_needs_its_own_output_keeps_it(last: nn.Module) -> None:
    """The gradient of tanh is computed from its output, which must not be overwritten by then."""
    labels, both = torch.tensor([1, 2, 0, 4]), []
    for loss in (usual, frugal_cross_entropy):
        given = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        meter = Meter()
        with meter.watching():  # whose hooks switch off torch's own check of overwritten tensors
            meter.begin([])
            loss(last(given @ torch.ones(6, 6).tril()), labels, 0.1).backward()
            meter.end()
        assert given.grad is not None
        both.append(given.grad)
    assert torch.equal(*both)


class Alive(TorchDispatchMode):
    """The most bytes of tensors made within it that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.now = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), given)
        return made

    def _count(self, storage: Any, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or key in given:
            return

        def freed(_: Any) -> None:
            del self._seen[key]
            self.now -= size

        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


class Decoder(nn.Module):
    """Hidden states [B, L, 8] to logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, classes, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        return self.lm_head(z)


class OwnLoss(LanguageModelling):
    """A user's own."""

    def loss(self, output: Any, target: Any) -> Tensor:
        return output.square().mean()


def a_pass(task: LanguageModelling, way: str, classes: int) -> tuple[list[Tensor], int, int]:
    """What a pass through a decoder gives: numbers, the most bytes alive at once, and what autograd kept."""
    torch.manual_seed(0)
    part, z = Decoder(classes), (torch.randn(4, 30, 8, requires_grad=True),)
    target = {"labels": torch.randint(classes, (4, 30), dtype=torch.int32), "mask": torch.rand(4, 30) < 0.6}
    meter, passes = Meter(), Passes(task, CPU)
    with meter.watching(), Alive() as alive:
        meter.begin(list(part.parameters()))
        gradients, loss = getattr(passes, way)(part, z, target)
        meter.end()
    assert loss is not None
    grads = [p.grad for p in part.parameters() if p.grad is not None]
    return [loss, *gradients, *grads], alive.most, meter.working_bytes


@pytest.mark.parametrize("way", ["learn", "cut_gradient"])
def test_a_pass_takes_the_logits_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same numbers and same bytes kept by autograd; but four times the logits' bytes with torch's own loss."""
    classes, piece = 20_000, 4 * 40_000
    monkeypatch.setattr(frugal_loss, "IN_A_PIECE", piece // 4)
    task = LanguageModelling(None, CPU, longest=31, vocabulary=classes)
    found, most, kept = a_pass(task, way, classes)
    monkeypatch.setattr(LanguageModelling, "loss_once", LanguageModelling.loss)
    expected, most_before, kept_before = a_pass(task, way, classes)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert kept == kept_before
    logits = kept // (4 * classes) * 4 * classes
    assert logits == 4 * TERMS * classes
    assert most < 1.05 * logits + 4 * piece
    assert most_before > 2.9 * logits


def test_a_derived_tasks_own_loss_is_used() -> None:
    task = OwnLoss(None, CPU, longest=31, vocabulary=50)
    output, target = torch.randn(3, 50), {"mask": torch.ones(1, 3, dtype=torch.bool), "labels": torch.zeros(1, 3)}
    assert torch.equal(task.loss_once(output, target), output.square().mean())

"""What crosses a cut travels with its samples in front, and what a batch has once travels for each sample."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsl_sage.split import SplitPlan, auxiliary, build_side, side_tensors, split_model
from tests.split.steps import assert_same_bits, split_step, whole_step

BATCH, LENGTH, WIDTH = 3, 5, 4
X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


class SequenceFirst(nn.Module):
    """Its blocks see [L, B, C], as XLNet's do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1).contiguous()
        for block in self.blocks:
            x = block(x).cumsum(0).tanh()
        return x[-1]


class Biased(nn.Module):
    """Adds what is learnt once for all texts, [1, L, C], and hands it on, as the first block of T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.bias if bias is None else bias
        return self.linear(x + bias).tanh(), bias * 2


class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Biased(), Biased()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(*self.one(x))[0]


def test_samples_come_first_on_the_wire_and_are_put_back_behind_it() -> None:
    model = SequenceFirst()
    split = split_model(model, "blocks.0", X)
    (tensor,) = split.plan.cuts[0].tensors
    assert (tensor.shape, tensor.batched, tensor.batch_dimension) == ((BATCH, LENGTH, WIDTH), True, 1)
    assert split.client(X).tensors[0].shape == (BATCH, LENGTH, WIDTH)
    for whole, parts in zip(whole_step(model, X, ()), split_step(split, X), strict=True):
        assert_same_bits(*[dict(enumerate(x)) if isinstance(x, list) else x for x in (whole, parts)])
    one = split.server(split.client(X).tensors[0][1:2])
    assert torch.allclose(one, model(X[1:2]))
    plan = SplitPlan.from_dict(split.plan.to_dict())
    client = build_side(SequenceFirst, plan, "client", side_tensors(split.client))
    assert torch.equal(client(X).tensors[0], split.client(X).tensors[0])
    assert auxiliary(split, "linear")(split.client(X)).shape == (BATCH, WIDTH)


def test_what_the_cut_has_once_for_a_batch_is_sent_for_each_sample() -> None:
    model = HandsOn()
    split = split_model(model, "one", X)
    sent = split.client(X)
    assert [tensor.for_each for tensor in split.plan.cuts[0].tensors] == [False, True]
    assert [tensor.shape for tensor in split.plan.cuts[0].tensors] == [tensor.shape for tensor in sent.tensors]
    assert sent.tensors[1].shape == (BATCH, LENGTH, WIDTH)
    samples = [split.server(tuple(tensor[i : i + 1] for tensor in sent.tensors)) for i in range(BATCH)]
    assert torch.equal(torch.cat(samples), model(X))
    for whole, parts in zip(whole_step(model, X, ()), split_step(split, X), strict=True):
        torch.testing.assert_close(*[dict(enumerate(x)) if isinstance(x, list) else x for x in (whole, parts)])


class Tied(nn.Module):
    """Its table has a third name, which nothing uses, as in BART and T5."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(7, WIDTH), nn.Embedding(7, WIDTH)
        self.body, self.shared = nn.Linear(WIDTH, WIDTH), nn.Embedding(7, WIDTH)
        self.one.weight = self.two.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.one(tokens) + self.two(tokens + 1))


def test_a_name_that_nothing_uses_goes_where_its_weights_are_used() -> None:
    split = split_model(Tied(), "two", torch.zeros(2, 3, dtype=torch.int64))
    assert split.plan.parts["client"] == ("one.weight", "two.weight", "shared.weight")
    assert split.plan.parts["server"] == ("body.weight", "body.bias")


class TwoNames(nn.Module):
    """Takes tokens under another name than it says, and its mask before them, as Perceiver does."""

    main_input_name = "inputs"

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any = None, attention_mask: Any = None, input_ids: Any = None) -> Tensor:
        x = self.body(self.table(input_ids if inputs is None else inputs))
        return x * attention_mask[..., None]


def test_tokens_are_the_raw_input_under_whatever_name_they_go() -> None:
    ones = torch.ones(2, 3, dtype=torch.int64)
    split = split_model(TwoNames(), "table", {"input_ids": ones, "attention_mask": ones})
    assert [tensor.name for tensor in split.plan.cuts[0].tensors] == ["table", "attention_mask"]


class Reads(nn.Module):
    """A decoder: looks at what the encoder has made from where its own text stands."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, own: Tensor, encoded: Tensor) -> Tensor:
        return self.mix[0](own) + self.mix[1](encoded)


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class EncodesAndReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.first, self.second = nn.Linear(WIDTH, WIDTH), Block(), Block()
        self.reads, self.head = Reads(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        own = self.own(x)
        return self.head(self.reads(own, self.second(self.first(x))))


@pytest.mark.parametrize("spec", ["linear", "blocks:1"])
def test_an_auxiliary_without_the_decoder_judges_what_the_encoder_made(spec: str) -> None:
    split = split_model(EncodesAndReads(), "first", X)
    received = split.client(X).detached()
    auxiliary(split, spec)(received).sum().backward()
    assert [tensor.grad is None for tensor in received.tensors] == [False, True]

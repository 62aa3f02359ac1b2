"""Laws of a split on models that each have one awkward property."""

import copy
import json
import pickle
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsl_sage.models import batch_statistics
from fsl_sage.split import Boundary, Split, SplitError, SplitPlan, build_side, fixed_tensors, side_tensors, split_model
from tests.split.families import FAMILIES


def mlp(*, inplace: bool = False) -> nn.Sequential:
    layers = [nn.Linear(6, 8), nn.ReLU(inplace), nn.Linear(8, 8), nn.ReLU(inplace), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


class Tokens(nn.Module):
    """A small transformer whose position embedding and class token are held by the model itself."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        self.scale = nn.Parameter(torch.randn(width))
        blocks = (nn.TransformerEncoderLayer(width, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0] * self.scale)


class Skips(nn.Module):
    """A U-Net in one dimension: two skips cross any cut in the middle."""

    def __init__(self, *, from_input: bool = False) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.up2, self.up1 = nn.Linear(12, 6), nn.Linear(12, 6)
        self.from_input = from_input

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(one)
        y = self.middle(two)
        y = self.up2(torch.cat([y, two], 1))
        return self.up1(torch.cat([y, x if self.from_input else one], 1))


def compare(model: nn.Module, split: Split, example: Any) -> None:
    """Outputs, gradients and the state after one pass equal those of a copy of the unsplit model."""
    whole = copy.deepcopy(model)
    call = (lambda m: m(**example)) if isinstance(example, dict) else (lambda m: m(example))
    expected = call(whole)
    expected.square().sum().backward()
    boundary = call(split.client)
    received = boundary.detached()
    output = split.server(received.tensors)
    output.square().sum().backward()
    pairs = [(t, r.grad) for t, r in zip(boundary.tensors, received.tensors, strict=True) if t.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    assert torch.equal(output, expected)
    gradients = {n: p.grad for part in split.parts for n, p in part.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert (parameter.grad is None) == (gradients[name] is None), name
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, gradients[name]), name
    merged = split.merged().state_dict()
    assert list(merged) == list(whole.state_dict())
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.state_dict().items())


def split_and_compare(model: nn.Module, cut: str, example: Any) -> Split:
    split = split_model(copy.deepcopy(model), cut, example)
    compare(model, split, example)
    return split


# -- what crosses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["patch", "blocks.0", "blocks.1", "blocks.0.linear1"])
def test_parameters_held_by_the_model_itself_go_to_the_side_that_uses_them(cut: str) -> None:
    split = split_and_compare(Tokens(), cut, torch.randn(2, 3, 8, 8))
    client = {name for name, _ in split.client.named_parameters()}
    assert ("position" in client) == ("token" in client) == (cut != "patch")
    assert "scale" not in client


def test_skips_across_the_cut_become_further_boundary_tensors() -> None:
    split = split_and_compare(Skips(), "middle", torch.randn(4, 6))
    assert [tensor.name for tensor in split.plan.cuts[0].tensors] == ["middle", "down1", "down2"]


def test_a_raw_input_never_crosses() -> None:
    with pytest.raises(SplitError, match="raw input 'x' is used after it, and raw inputs never cross"):
        split_model(Skips(from_input=True), "middle", torch.randn(4, 6))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor, secret: Tensor | None = None) -> Tensor:
        y = self.one(x) * mask
        if mask.all():  # read into Python: the server must take the same way
            y = y + 1
        if secret is not None:
            y = y + secret
        return self.two(y)


def test_other_inputs_are_sent_along_only_if_they_are_needed_and_not_private() -> None:
    example = {"x": torch.randn(4, 6), "mask": torch.ones(4, 6)}
    split = split_and_compare(Masked(), "one", example)
    assert [tensor.name for tensor in split.plan.cuts[0].tensors] == ["one", "mask"]
    secret = {**example, "secret": torch.randn(4, 6)}
    assert len(split_model(Masked(), "one", secret).plan.cuts[0].tensors) == 3
    with pytest.raises(SplitError, match="raw input 'secret'"):
        split_model(Masked(), "one", secret, private=["secret"])
    with pytest.raises(SplitError, match="private input 'secrets' is not in the example"):
        split_model(Masked(), "one", secret, private=["secrets"])


def test_the_raw_input_is_the_one_that_the_model_declares() -> None:
    model, example = FAMILIES["gpt2_lora"]()  # its forward takes **kwargs: the order of the inputs tells nothing
    assert isinstance(example, dict)
    split = split_model(model, "base_model.model.transformer.h.0", dict(reversed(example.items())))
    assert [tensor.name for tensor in split.plan.cuts[0].tensors[1:]] == ["attention_mask"]


def test_an_input_that_the_code_branches_on_before_the_cut_is_sent_along() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scale = 2 if mask.all() else 1
            return self.two(self.one(x)) * scale

    x = torch.randn(4, 6)
    split = split_model(Branches(), "one", {"x": x, "mask": torch.zeros(4)})
    for mask in (torch.zeros(4), torch.ones(4)):
        assert torch.equal(split(x=x, mask=mask), split.merged()(x=x, mask=mask))


def test_the_client_is_called_as_the_model_is() -> None:
    example = {"x": torch.randn(4, 6), "mask": torch.ones(4, 6)}
    split = split_model(Masked(), "one", example)
    reordered = {"mask": example["mask"], "x": example["x"]}
    outputs = [split(example), split(**example), split(**reordered), split.merged()(**example)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    with pytest.raises(SplitError, match="split for the inputs x, mask and is called with x"):
        split.client(x=example["x"])


class Hidden(nn.Module):
    """The second block looks at what the first one left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Keeps(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) + self.one.kept.sum()


class Keeps(nn.Linear):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept * 2


def test_a_value_that_crosses_unseen_is_named() -> None:
    with pytest.raises(SplitError, match="a value made inside 'one', which it does not return, is used after it"):
        split_model(Hidden(), "one", torch.randn(2, 6))


class Angles(nn.Module):
    """Depends on positions only, as rotary embeddings do."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(torch.arange(x.shape[1]).unsqueeze(1) * self.frequencies)


class Rotary(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.angles = Angles(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = self.angles(x)
        for layer in self.layers:
            x = layer(x) * angles
        return self.head(x)


def test_what_depends_on_positions_only_is_recomputed_behind_the_cut() -> None:
    model = Rotary()
    split = split_and_compare(model, "layers.1", torch.randint(9, (2, 5)))
    assert split.plan.cuts[0].repeated == ("angles",)
    assert len(split.plan.cuts[0].tensors) == 1
    longer = torch.randint(9, (3, 11))  # another batch size and another length, from the tensors alone
    assert torch.equal(split.server(split.client(longer).tensors), split.merged()(longer))


class Shared(nn.Module):
    """One dropout result and one activation module, used before and after the cut."""

    def __init__(self, *, inline: bool) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop, self.act = nn.Dropout(0.5), nn.ReLU()
        self.inline = inline

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.one(x))
        x = F.dropout(x, 0.5, self.training) if self.inline else self.drop(x)
        return self.three(self.act(self.two(x)) + x)


def test_both_sides_see_the_same_dropout() -> None:
    split = split_model(Shared(inline=False), "two", torch.randn(4, 6))
    assert [tensor.name for tensor in split.plan.cuts[0].tensors] == ["two", "drop"]
    x = torch.randn(4, 6)
    torch.manual_seed(3)
    expected = split.merged()(x)
    torch.manual_seed(3)
    assert torch.equal(split(x), expected)


def test_chance_that_cannot_be_sent_is_an_obstacle() -> None:
    with pytest.raises(SplitError, match="a random number drawn by 'dropout' in the model is used on both sides"):
        split_model(Shared(inline=True), "two", torch.randn(4, 6))


# -- values changed in place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["0", "1", "2"])
def test_in_place_activations_leave_the_received_tensor_alone(cut: str) -> None:
    x = torch.randn(4, 6)
    split = split_and_compare(mlp(inplace=True), cut, x)
    received = split.client(x).detached()
    before = received.tensors[0].detach().clone()
    split.server(received)
    assert torch.equal(received.tensors[0], before)


class Writes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.act = nn.ReLU(inplace=True)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if self.how == "between the calls":
            x.mul_(2)
        elif self.how == "inside a call":
            self.act(x)  # its result is not used: x has changed
        y = self.two(x)
        if self.how == "after the cut":
            y.mul_(2)
        return self.three(y + x)


@pytest.mark.parametrize("how", ["between the calls", "inside a call", "after the cut"])
def test_values_changed_in_place_before_and_after_the_cut(how: str) -> None:
    split_and_compare(Writes(how), "two", torch.randn(4, 6))


def test_a_model_that_changes_its_input_in_place() -> None:
    class Centred(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(1))

    example = torch.randn(4, 6)
    before = example.clone()
    split = split_model(Centred(nn.Linear(6, 6), nn.Linear(6, 3)), "0", example)
    assert torch.equal(example, before)
    assert torch.equal(split(example.clone()), split.merged()(example.clone()))


class WritesIntoStub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y[:, 0] = 0
        return self.three(self.two(y))


def test_code_that_writes_into_a_placeholder_gets_one_with_memory() -> None:
    assert split_and_compare(WritesIntoStub(), "two", torch.randn(4, 6)).plan.dense


# -- tied weights ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(ids)))


def test_tied_weights_on_both_sides_are_refused_unless_untied_or_frozen() -> None:
    ids = torch.randint(9, (2, 4))
    with pytest.raises(SplitError, match=r"'embed.weight' and 'head.weight' are the same weights on both sides"):
        split_model(Tied(), "middle", ids)
    split = split_model(Tied(), "middle", ids, tied="untie")
    assert split.plan.untied == ("head.weight",)
    merged = split.merged()
    assert merged.head.weight is not merged.embed.weight
    assert torch.equal(merged.head.weight, merged.embed.weight)
    frozen = Tied()
    frozen.embed.weight.requires_grad_(False)
    split = split_model(frozen, "middle", ids)
    assert split.plan.untied == ()
    assert [set(part.state_dict()) & {"embed.weight", "head.weight"} for part in split.parts] == [
        {"embed.weight"},
        {"head.weight"},
    ]
    assert split.merged().head.weight is split.merged().embed.weight


def test_one_parameter_used_on_both_sides_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x * self.gain) * self.gain)

    with pytest.raises(SplitError, match="the parameter 'gain' is used on both sides"):
        split_model(Twice(), "one", torch.randn(2, 6))


def test_a_frozen_module_that_does_not_see_the_input_runs_on_both_sides() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.one, self.two = nn.Embedding(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            bias = self.bias(torch.arange(6))
            return self.two(self.one(x @ bias) @ bias)

    model, x = Biased(), torch.randn(2, 6)
    sent = [tensor.name for tensor in split_model(model, "one", x).plan.cuts[0].tensors]
    assert sent == ["one", "bias"]
    model.bias.requires_grad_(False)
    split = split_model(model, "one", x)
    assert [tensor.name for tensor in split.plan.cuts[0].tensors] == ["one"]
    assert all("bias.weight" in part.state_dict() for part in split.parts)
    assert torch.equal(split(x), model(x))


# -- bad cuts --------------------------------------------------------------------------------------------------------


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.unused, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.again(self.first(x))))


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        ("nothing", "no module has this name"),
        ("again", "it is called 2 times in one forward pass"),
        ("unused", "it is not called in the forward pass"),
        ("last", "no parameters come after it"),
        ("", "it is the model itself"),
    ],
)
def test_bad_cuts_are_refused_with_the_names_that_work(cut: str, reason: str) -> None:
    with pytest.raises(SplitError, match=f"{reason}.*; cuts that work: first"):
        split_model(Repeats(), cut, torch.randn(2, 6))


@pytest.mark.parametrize("cut", [None, 3, (), ("first", "again", "last"), ("first", 2)])
def test_what_is_no_cut_is_refused_with_the_names_that_work(cut: Any) -> None:
    with pytest.raises(SplitError, match="give a module's name, or two for a U-shape; cuts that work: first"):
        split_model(Repeats(), cut, torch.randn(2, 6))


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(SplitError, match=r"a function cannot be split; give a torch\.nn\.Module"):
        split_model(lambda x: x, "first", torch.randn(2, 6))  # type: ignore[arg-type]


def test_an_example_without_tensors_is_refused() -> None:
    with pytest.raises(SplitError, match="the example holds no tensor"):
        split_model(mlp(), "0", {"x": 3})


def test_a_wrong_number_of_tensors_is_refused() -> None:
    split = split_model(Skips(), "middle", torch.randn(4, 6))
    with pytest.raises(SplitError, match=r"3 tensors cross at 'middle' \(middle, down1, down2\); 1 were given"):
        split.server(torch.randn(4, 6))


# -- modules as others use them --------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm1, self.two, self.norm2 = (
            nn.Linear(6, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
            nn.BatchNorm1d(3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.two(F.relu(self.norm1(self.one(x)))))


def test_splitting_changes_neither_the_model_nor_the_random_numbers() -> None:
    model = Normed()
    model.norm2.eval()
    before = copy.deepcopy(model.state_dict())
    example = torch.randn(1, 6)
    random = torch.get_rng_state()
    split = split_model(model, "norm1", example)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [m.training for m in model.modules()] == [True, True, True, True, False]
    assert [split.client.norm1.training, split.server.norm2.training] == [True, False]
    assert "forward" not in model.one.__dict__


def test_what_nobody_uses_stays_with_the_module_it_belongs_to() -> None:
    class Spare(nn.Linear):
        def __init__(self, wide: int) -> None:
            super().__init__(6, wide)
            self.spare = nn.Parameter(torch.zeros(3))
            self.inner = nn.Linear(2, 2)

    model = nn.Sequential(Spare(6), nn.ReLU(), Spare(3))
    split = split_model(model, "1", torch.randn(4, 6))
    assert {name.split(".")[0] for name in split.client.state_dict()} == {"0"}
    assert {name.split(".")[0] for name in split.server.state_dict()} == {"2"}


def test_a_buffer_that_changes_in_evaluation_is_restored() -> None:
    class Counts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counts(nn.Linear(6, 6), nn.Linear(6, 3))
    model.register_buffer("calls", torch.zeros(1))
    split_model(model, "0", torch.randn(4, 6))
    assert model.calls == 0


def test_a_module_called_before_the_cut_only_in_training() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.act = nn.Linear(6, 6), nn.Linear(6, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(x) if self.training else x
            return self.act(self.two(self.one(x)))

    split = split_model(Sometimes(), "one", torch.randn(4, 6))
    x = torch.randn(4, 6)
    assert torch.equal(split(x), split.merged()(x))
    whole = split.merged().eval()
    for part in split.parts:
        part.eval()
    assert torch.equal(split.server(split.client(x).tensors), whole(x))


def test_batch_norm_statistics_and_modes() -> None:
    x = torch.randn(8, 6)
    split = split_and_compare(Normed(), "norm1", x)
    assert set(split.client.state_dict()) & set(split.server.state_dict()) == set()
    assert "norm1.running_mean" in split.client.state_dict()
    split.client.eval()
    split.server.eval()
    assert not split.client.norm1.training
    assert torch.equal(split(x[:1]), split.merged().eval()(x[:1]))


def test_the_models_own_mode_follows_too() -> None:
    class Noisy(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if self.training else 1)

    split = split_model(Noisy(nn.Linear(6, 6), nn.Linear(6, 3)), "0", torch.randn(4, 6))
    x = torch.randn(4, 6)
    trained = split(x)
    for part in split.parts:
        part.eval()
    assert torch.equal(trained, 2 * split(x))
    for part in split.parts:
        with batch_statistics(part.train()):
            assert not part.training  # dropout off, also where the model's own code asks
        assert part.training
    assert torch.equal(trained, split(x))


@pytest.mark.parametrize("cut", ["blocks.0", "blocks.0.linear1"])
def test_evaluation_without_gradients_goes_through_an_encoder_layer(cut: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    split = split_model(Tokens().eval(), cut, x)
    with torch.no_grad():
        assert torch.allclose(split(x), split.merged()(x), atol=1e-6)


def test_a_larger_batch_than_the_examples() -> None:
    split = split_model(Tokens(), "blocks.0", torch.randn(2, 3, 8, 8))
    x = torch.randn(7, 3, 8, 8)
    assert torch.equal(split.server(split.client(x).tensors), split.merged()(x))


def test_parameters_replaced_by_reference_are_used() -> None:
    split = split_model(mlp(), "1", torch.randn(2, 6))
    other = nn.Parameter(torch.zeros(8, 6))
    split.client.get_submodule("0")._parameters["weight"] = other
    split.client(torch.randn(2, 6)).tensors[0].sum().backward()
    assert other.grad is not None
    assert torch.equal(split.merged().get_submodule("0").weight, other)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = (
            nn.Embedding(9, 6),
            nn.LSTM(6, 6, batch_first=True),
            nn.LSTM(6, 6, batch_first=True),
        )
        self.head = nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.one(self.embed(ids))
        return self.head(self.two(x)[0])


def test_recurrent_layers_follow_their_parameters() -> None:
    split = split_and_compare(Recurrent(), "one", torch.randint(9, (2, 5)))
    other = nn.Parameter(torch.zeros_like(split.client.one.weight_ih_l0))
    split.client.one._parameters["weight_ih_l0"] = other
    split.client(torch.randint(9, (2, 5))).tensors[0].sum().backward()
    assert other.grad is not None
    held = sum(tensor.untyped_storage().nbytes() for tensor in split.server.one._flat_weights)
    assert held == 4 * len(split.server.one._flat_weights)  # one number each: the client's weights are not kept


def test_copies_are_independent() -> None:
    x = torch.randn(4, 6)
    split = split_model(Normed(), "norm1", x)
    twin = copy.deepcopy(split.client)
    with torch.no_grad():
        twin.one.weight.zero_()
    assert split.client.one.weight.abs().sum() > 0
    assert not torch.equal(twin(x).tensors[0], split.client(x).tensors[0])
    shared = copy.deepcopy(split)
    shared.client(x)
    assert torch.equal(shared.merged().norm1.running_mean, shared.client.norm1.running_mean)


def test_parts_can_be_pickled() -> None:
    x = torch.randn(4, 3, 8, 8)
    split = split_model(Tokens(), "blocks.0", x)
    client, server = pickle.loads(pickle.dumps((split.client, split.server)))
    assert torch.equal(server(client(x)), split(x))


def test_copies_run_side_by_side_in_threads() -> None:
    x = torch.randn(16, 3, 8, 8)
    split = split_model(Tokens(), "blocks.0", x)
    expected = split(x)
    results: list[Tensor] = []

    def work(client: nn.Module, server: nn.Module) -> None:
        for _ in range(20):
            results.append(server(client(x)))

    copies = [(copy.deepcopy(split.client), copy.deepcopy(split.server)) for _ in range(4)]
    threads = [threading.Thread(target=work, args=pair) for pair in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(torch.equal(result, expected) for result in results)


def test_parts_follow_a_change_of_type() -> None:
    split = split_model(Tokens(), "blocks.0", torch.randn(2, 3, 8, 8))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    whole = split.merged().double()  # converts the shared parameters, and so the parts'
    for part in split.parts:
        part.double()
    assert torch.equal(split.server(split.client(x).tensors), whole(x))
    assert split.server.patch.weight.dtype == torch.float64  # what stands for the client's weights


def test_activation_checkpointing_before_and_behind_the_cut() -> None:
    class Checkpointed(Tokens):
        def forward(self, images: Tensor) -> Tensor:
            x = self.patch(images).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x[:, 0])

    split_and_compare(Checkpointed(), "blocks.0", torch.randn(2, 3, 8, 8))


def test_memory_format_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    split = split_model(model, "0", x)
    boundary = split.client(x)
    assert boundary.tensors[0].is_contiguous(memory_format=torch.channels_last)
    split.server.to(memory_format=torch.channels_last)  # also converts what stands for the client's weights
    assert torch.equal(split(x), model(x))


# -- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_plain_data() -> None:
    plan = split_model(Rotary(), "layers.1", torch.randint(9, (2, 5))).plan
    assert SplitPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("make", [Rotary, Recurrent])
def test_one_side_is_built_from_the_plan_with_its_own_tensors_only(make: Any) -> None:
    ids = torch.randint(9, (2, 5))
    cut = "layers.1" if make is Rotary else "one"
    split = split_model(make(), cut, ids)
    parts = {}
    for side in ("client", "server"):
        empty = build_side(make, split.plan, side)
        assert all(tensor.is_meta for tensor in empty.state_dict().values())
        parts[side] = build_side(make, split.plan, side, side_tensors(getattr(split, side)))
        assert parts[side].state_dict().keys() == getattr(split, side).state_dict().keys()
        assert [p.requires_grad for p in parts[side].parameters()]
    assert torch.equal(parts["server"](parts["client"](ids)), split(ids))


def test_tensors_that_do_not_fit_a_side_are_refused() -> None:
    split = split_model(mlp(), "1", torch.randn(2, 6))
    tensors = side_tensors(split.client)
    with pytest.raises(SplitError, match=r"'0.bias' is missing"):
        build_side(mlp, split.plan, "client", {"0.weight": tensors["0.weight"]})
    with pytest.raises(SplitError, match=r"'4.bias' is not part of it"):
        build_side(mlp, split.plan, "client", {**tensors, "4.bias": torch.zeros(3)})
    with pytest.raises(SplitError, match=r"'0.bias' has the shape \(8,\); a tensor of \(3,\) came"):
        build_side(mlp, split.plan, "client", {**tensors, "0.bias": torch.zeros(3)})
    with pytest.raises(SplitError, match="the plan has no part 'head'; it has client, server"):
        build_side(mlp, split.plan, "head")


# -- U-shaped splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "cuts"),
    [
        (Tokens(), ("blocks.0", "blocks.1")),
        (Tokens(), ("patch", "blocks.0.linear1")),
        (mlp(inplace=True), ("0", "2")),
        (Normed(), ("one", "norm1")),
        (Skips(), ("down2", "up2")),
    ],
)
def test_a_u_shape_keeps_the_head_at_the_client(model: nn.Module, cuts: tuple[str, str]) -> None:
    x = torch.randn(2, 3, 8, 8) if isinstance(model, Tokens) else torch.randn(4, 6)
    whole = copy.deepcopy(model)
    split = split_model(model, cuts, x)
    expected, output = whole(x), split.head(split.server(split.client(x)))
    assert torch.equal(output, expected)
    expected.square().sum().backward()
    output.square().sum().backward()
    gradients = {n: p.grad for part in split.parts for n, p in part.named_parameters()}
    assert all(torch.equal(p.grad, gradients[n]) for n, p in whole.named_parameters())
    names = [set(part.state_dict()) for part in split.parts]
    assert set.union(*names) == set(whole.state_dict())
    assert sum(map(len, names)) == len(whole.state_dict())
    merged = split.merged().state_dict()
    assert all(torch.equal(merged[n], t) for n, t in whole.state_dict().items())
    by_tensors = split.head(split.server(split.client(x).tensors).tensors)
    assert torch.equal(split.merged().eval()(x), split_eval(split, x))
    assert by_tensors.shape == output.shape


def split_eval(split: Split, x: Tensor) -> Tensor:
    for part in split.parts:
        part.eval()
    return split.head(split.server(split.client(x).tensors).tensors)


def test_cuts_of_a_u_shape_must_be_in_order_with_parameters_between() -> None:
    x = torch.randn(2, 6)
    with pytest.raises(SplitError, match="'0' does not come after '2'"):
        split_model(mlp(), ("2", "0"), x)
    with pytest.raises(SplitError, match="no parameters lie between the cuts '0' and '1'"):
        split_model(mlp(), ("0", "1"), x)
    with pytest.raises(SplitError, match="a split at one cut has no head"):
        _ = split_model(mlp(), "0", x).head


def test_a_boundary_can_be_given_whole_or_as_tensors() -> None:
    x = torch.randn(4, 6)
    split = split_model(Skips(), "middle", x)
    boundary = split.client(x)
    outputs = [
        split.server(b) for b in (boundary, Boundary(boundary.tensors), boundary.tensors, list(boundary.tensors))
    ]
    outputs.append(split.server(*boundary.tensors))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


class ReadsLengths(nn.Module):
    """How many tokens a text has is read into Python before the cut and used behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        lengths = (input_ids != 0).sum(1).clamp(min=1).tolist()
        rows = self.mix(self.embed(input_ids))
        return self.head(torch.stack([row[:n].mean(0) for row, n in zip(rows, lengths, strict=True)]))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        bright = bool(x.mean() > 0)
        y = self.first(x)
        return self.second(2 * y if bright else y)


@pytest.mark.parametrize(
    ("model", "cut", "example"),
    [(ReadsLengths, "mix", torch.zeros(2, 5, dtype=torch.int64)), (Branches, "first", torch.zeros(3, 4))],
)
def test_code_that_depends_behind_the_cut_on_what_it_read_of_the_raw_input_is_refused(model, cut, example) -> None:
    """Zeros, as a run's example has them, lead to the branch that placeholders lead to: other inputs are tried."""
    torch.manual_seed(0)
    with pytest.raises(SplitError, match="depends on values of the raw input that it has read before it"):
        split_model(model(), cut, example)


def test_a_model_that_cannot_be_copied_is_told() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
            self.last = self.first(torch.ones(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    with pytest.raises(SplitError, match=r"the model cannot be copied: .* must not keep computed tensors"):
        split_model(Keeps(), "first", torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler itself calls some of it
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (torch.compile, "the model was compiled by torch.compile, so it cannot be cut: give it as it was before"),
        (torch.jit.script, "the model was compiled by torch.jit"),
        (lambda model: nn.Sequential(model[0], torch.compile(model[1])), "the model's module '1' was compiled"),
    ],
)
def test_a_compiled_model_is_told(spoil, said) -> None:
    with pytest.raises(SplitError, match=re.escape(said)):
        split_model(spoil(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))), "0", torch.ones(2, 4))


def test_the_weights_of_an_lstm_are_nothing_fixed() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True)
            self.head = nn.Linear(5, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(ids))[0][:, -1])

    ids = torch.randint(9, (3, 6))
    split = split_model(Reads(), "embed", ids)
    assert fixed_tensors(split.client) == {}
    assert fixed_tensors(split.server) == {}

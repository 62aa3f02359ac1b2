"""The ridge auxiliary: its features, what it holds, what it refuses; and the closed form that fits it."""

import math
import pickle

import pytest
import torch
from torch import nn

from fsl_sage.alignment.matching import UnusableError
from fsl_sage.alignment.regression import Sums, fit
from fsl_sage.split import BoundaryTensor, Ridge, SplitError, random_features

CPU = torch.device("cpu")
HIDDEN, VOCABULARY = 6, 11


def crossing(*shape, dtype="float32", name="z"):
    return BoundaryTensor(name, name, 0, 0, shape, dtype, batched=True, copied=False)


def of_texts(random=0):
    draw = torch.Generator().manual_seed(3)
    table = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=draw), requires_grad=False)
    return Ridge([crossing(2, 5, HIDDEN)], embedding=("model.words.weight", table), random=random)


def texts(batch=4, length=7, seed=0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(VOCABULARY, (batch, length), generator=draw, dtype=torch.int32)
    ends = torch.randint(3, length + 1, (batch, 1), generator=draw)
    places = torch.arange(length)
    mask = (places >= 2) & (places < ends)
    return (torch.randn(batch, length, HIDDEN, generator=draw),), {"labels": labels, "mask": mask}


def of_images(random=0):
    return Ridge([crossing(2, 4, 3, 3)], values=5, random=random)


def images(batch=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (batch,), generator=draw)
    return (torch.randn(batch, 4, 3, 3, generator=draw).relu(),), {"labels": labels}


def test_the_words_for_it():
    assert [random_features(spec) for spec in ("blocks:1", "ridge", "ridge:3072", None, 500)] == [
        None,
        0,
        3072,
        None,
        None,
    ]
    for wrong in ("ridge:", "ridge:0", "ridge:-3", "ridge:many"):
        with pytest.raises(SplitError, match='"ridge:N" with N random features'):
            random_features(wrong)


@pytest.mark.parametrize(("ridge", "given"), [(of_texts(), texts()), (of_images(9), images()), (of_texts(9), texts())])
def test_what_is_linear_in_the_features_is_found_exactly(ridge, given):
    """The gradient of a known W is fitted: after enough rows, and held by next to nothing, W is found again."""
    wanted = torch.randn(ridge.weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ridge = ridge.double()
    sums = Sums.nothing(ridge, CPU)
    for seed in range(40):
        z, target = texts(seed=seed) if len(given[1]) == 2 else images(seed=seed)
        z = (z[0].double(),)
        ridge.weight.data.copy_(wanted)
        sums.add(ridge, z, target, ridge.estimate(z, target), 0.0)
    found = fit(sums, 1e-12)
    ridge.weight.data.copy_(found)
    z, target = texts(seed=99) if len(given[1]) == 2 else images(seed=99)
    ours = ridge.estimate((z[0].double(),), target)
    ridge.weight.data.copy_(wanted)
    torch.testing.assert_close(ours, ridge.estimate((z[0].double(),), target), rtol=1e-5, atol=1e-5)


def nothing_has_a_loss(target):
    return target | {"mask": torch.zeros_like(target["mask"])}


@pytest.mark.parametrize(
    ("changed", "factor"),
    [(dict, 0.0), (dict, math.nan), (nothing_has_a_loss, 1.0)],
    ids=["zero gradients", "nan gradients", "no token with a loss"],
)
def test_uploads_that_say_nothing_are_left_out(changed, factor):
    """A client may send texts whose sentences were all cut off: they must not spoil the sums of the others."""
    ridge = of_texts()
    sums = Sums.nothing(ridge, CPU)
    z, target = texts()
    sums.add(ridge, z, target, torch.randn_like(z[0]), 0.1)
    before = {name: each.clone() for name, each in sums.state().items()}
    sums.add(ridge, z, changed(target), torch.ones_like(z[0]) * factor, 0.1)
    torch.testing.assert_close(sums.state(), before, rtol=0, atol=0)


def test_padding_changes_nothing():
    """Uploads are put together with zeros at the end of shorter texts."""
    ridge = of_texts(9)
    ridge.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    (z,), target = texts()
    longer = nn.functional.pad(z, (0, 0, 0, 4))
    padded = {name: nn.functional.pad(tensor, (0, 4)) for name, tensor in target.items()}
    plain, again = ridge.estimate((z,), target), ridge.estimate((longer,), padded)
    torch.testing.assert_close(again[:, :7], plain)
    assert not again[:, 7:].any()
    sums = [Sums.nothing(ridge, CPU) for _ in range(2)]
    for own, (x, y) in zip(sums, ((z, target), (longer, padded)), strict=True):
        own.add(ridge, (x,), y, torch.ones_like(x), 0.0)
    torch.testing.assert_close(sums[1].features, sums[0].features)
    torch.testing.assert_close(sums[1].products, sums[0].products)


def test_behind_the_last_token_that_counts_the_estimate_is_zero_and_before_it_is_not():
    ridge = of_texts()
    ridge.weight.data.fill_(0.1)
    z, target = texts()
    last = [int(row.nonzero().max()) for row in target["mask"]]
    estimate = ridge.estimate(z, target)
    for text, end in enumerate(last):
        assert estimate[text, : end + 1].abs().sum(1).min() > 0
        assert not estimate[text, end + 1 :].any()


@pytest.mark.parametrize(("ridge", "given"), [(of_texts(9), texts()), (of_images(9), images())])
def test_the_length_of_activations_does_not_count(ridge, given):
    (z,), target = given
    torch.testing.assert_close(ridge.rows((1000 * z,), target)[0], ridge.rows((z,), target)[0])


def test_an_image_that_is_all_zero_is_no_trouble():
    z, target = images()
    assert of_images().rows((torch.zeros_like(z[0]),), target)[0].isfinite().all()


def test_only_its_weights_travel_and_the_random_features_are_drawn_anew():
    ridge = of_texts(9)
    assert [name for name, weight in ridge.named_parameters() if weight.requires_grad] == ["weight"]
    assert list(ridge.state_dict()) == ["weight", "model.words.weight"]
    assert not list(ridge.buffers())
    signs = ridge._drawn.signs(9, ridge.inputs, 0)
    torch.testing.assert_close(signs.abs(), torch.full_like(signs, 1 / math.sqrt(ridge.inputs)))
    again = pickle.loads(pickle.dumps(ridge))
    assert again._drawn._signs is None
    assert torch.equal(again._drawn.signs(9, ridge.inputs, 0), signs)
    assert not torch.equal(Ridge([crossing(2, 4)], values=5, random=9, seed=1)._drawn.signs(9, 10, 1), signs[:, :10])


def test_flat_activations_need_no_mean():
    ridge = Ridge([crossing(2, 4)], values=5)
    assert ridge.inputs == 4 + 5 + 1
    estimate = ridge.estimate((torch.randn(3, 4),), {"labels": torch.tensor([0, 1, 4])})
    assert estimate.shape == (3, 4)


@pytest.mark.parametrize(
    ("boundary", "values", "said"),
    [
        ([crossing(2, 4, name="a"), crossing(2, 3, name="b")], 5, "here 2 cross: a, b"),
        ([crossing(2, 4, dtype="int64")], 5, "here 0 cross"),
        ([crossing(2, 4)], None, "their number is not known"),
        ([crossing(2, 4)], 5000, "their number is 5000"),
    ],
)
def test_what_it_cannot_estimate_is_refused(boundary, values, said):
    with pytest.raises(SplitError, match=said):
        Ridge(boundary, values=values)


def test_it_has_no_output():
    with pytest.raises(SplitError, match="no output"):
        of_images()(images()[0][0])


def test_nothing_to_fit_is_said():
    ridge = of_images()
    sums = Sums.nothing(ridge, CPU)
    z, target = images()
    sums.add(ridge, z, target, torch.zeros_like(z[0]), 0.1)
    with pytest.raises(UnusableError, match="all zero"):
        fit(sums, 0.1)


def test_an_upload_that_is_not_finite_leaves_no_trace():
    ridge = of_images()
    sums = Sums.nothing(ridge, CPU)
    z, target = images()
    sums.add(ridge, z, target, torch.ones_like(z[0]), 0.1)
    before = {name: tensor.clone() for name, tensor in sums.state().items()}
    sums.add(ridge, z, target, torch.full_like(z[0], math.nan), 0.1)
    sums.add(ridge, (z[0] / 0,), target, torch.ones_like(z[0]), 0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in sums.state().items())


@pytest.mark.parametrize("random", [0, 9])
def test_how_activations_lie_in_memory_changes_no_bit(random):
    """On one engine they are as the model made them, on another as a network brought them."""
    ridge = Ridge([crossing(2, 24, 9, 9)], values=5, random=random)
    draw = torch.Generator().manual_seed(0)
    z, gradient = (torch.randn(16, 24, 9, 9, generator=draw) for _ in range(2))
    target = {"labels": torch.arange(16) % 5}
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        sums = Sums.nothing(ridge, CPU)
        laid = [x.to(memory_format=layout) for x in (z, gradient)]
        sums.add(ridge, (laid[0],), target, laid[1], 0.0)
        weight = fit(sums, 0.1).float()
        assert weight.is_contiguous()
        ridge.weight.data.copy_(weight)
        found.append((weight, ridge.estimate((laid[0],), target).contiguous()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

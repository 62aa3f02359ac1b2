import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_sage.errors import InputError
from fsl_sage.problems.batches import batch_indices, batch_sizes
from fsl_sage.problems.images.augment import PADDING, augment, normalise


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(deadline=None)
@given(st.integers(2, 5000), st.integers(2, 300))
def test_batches_cover_an_epoch_and_none_is_single(examples, batch_size):
    sizes = batch_sizes(examples, batch_size)
    assert sum(sizes) == examples
    assert min(sizes) >= 2
    assert all(size == batch_size for size in sizes[:-1])
    assert sizes[-1] <= batch_size + 1


@pytest.mark.parametrize(
    ("examples", "batch_size", "sizes"),
    [(10, 5, [5, 5]), (12, 5, [5, 5, 2]), (11, 5, [5, 6]), (3, 2, [3]), (2, 256, [2]), (5000, 256, [256] * 19 + [136])],
)
def test_the_last_batch(examples, batch_size, sizes):
    assert batch_sizes(examples, batch_size) == sizes


@settings(deadline=None)
@given(st.integers(2, 400), st.integers(2, 50), st.integers(0, 1000))
def test_indices_are_a_permutation_cut_by_the_sizes(examples, batch_size, seed):
    batches = batch_indices(examples, batch_size, generator(seed))
    assert [len(batch) for batch in batches] == batch_sizes(examples, batch_size)
    assert torch.equal(torch.cat(batches).sort().values, torch.arange(examples))
    again = batch_indices(examples, batch_size, generator(seed))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


@pytest.mark.parametrize(("examples", "batch_size"), [(10, 1), (10, 0), (10, -4), (1, 4), (0, 4)])
def test_impossible_batches_are_refused(examples, batch_size):
    with pytest.raises(InputError):
        batch_sizes(examples, batch_size)


def every_crop(image: torch.Tensor) -> set[bytes]:
    """All results that augmenting [C, H, W] may have, made one by one from the definition."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * PADDING, width + 2 * PADDING, dtype=torch.uint8)
    padded[:, PADDING:-PADDING, PADDING:-PADDING] = image
    crops = [
        padded[:, top : top + height, left : left + width]
        for top in range(2 * PADDING + 1)
        for left in range(2 * PADDING + 1)
    ]
    return {c.numpy().tobytes() for crop in crops for c in (crop, crop.flip(2))}


def test_augmented_images_are_crops_and_flips_each_by_its_own_draw():
    image = torch.randint(0, 256, (3, 6, 10), dtype=torch.uint8, generator=generator())
    results = {x.numpy().tobytes() for x in augment(image.repeat(4000, 1, 1, 1), generator(1))}
    # 162 equally likely results, all of them seen in 4,000 draws but for odds of 1e-9.
    assert results == every_crop(image)
    assert len(results) == 162


def test_augmentation_is_its_generator_and_leaves_the_images_alone():
    x = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8, generator=generator())
    before = x.clone()
    one, same, other = augment(x, generator(1)), augment(x, generator(1)), augment(x, generator(2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(x, before)
    assert one.dtype == torch.uint8
    assert one.shape == x.shape


def test_augmentation_draws_on_the_cpu_for_images_elsewhere():
    assert augment(torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device="meta"), generator()).device.type == "meta"


def test_normalise_is_the_formula_per_channel():
    x = torch.randint(0, 256, (5, 2, 4, 4), dtype=torch.uint8, generator=generator())
    found = normalise(x, (0.25, 0.5), (0.5, 2.0))
    assert found.dtype == torch.float32
    expected = torch.stack([(x[:, 0] / 255 - 0.25) / 0.5, (x[:, 1] / 255 - 0.5) / 2.0], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

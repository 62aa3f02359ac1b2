import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_sage.errors import InputError
from fsl_sage.problems.partition import KINDS, client_sizes, partition

OF_EQUAL_SIZE = [kind for kind in KINDS if kind != "restaurant"]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def proportions(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    counts = np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
    return counts / counts.sum(axis=1, keepdims=True)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 3000))
def test_client_sizes_are_equal_up_to_one(clients, extra):
    sizes = client_sizes(2 * clients + extra, clients)
    assert sum(sizes) == 2 * clients + extra
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=200, deadline=None)
@given(
    labels=st.lists(st.integers(0, 12), min_size=2, max_size=120).map(np.array),
    share=st.floats(0, 1),
    kind=st.sampled_from(OF_EQUAL_SIZE),
    alpha=st.floats(-6, 9).map(lambda exponent: 10.0**exponent),
    shards=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_image_belongs_to_exactly_one_client(labels, share, kind, alpha, shards, seed):
    clients = 1 + int(share * (len(labels) // 2 - 1))
    sizes = client_sizes(len(labels), clients)
    shards = min(shards, min(sizes))
    parts = partition(labels, clients, kind, alpha=alpha, shards_per_client=shards, rng=rng(seed))
    assert [len(part) for part in parts] == sizes
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@settings(max_examples=100, deadline=None)
@given(
    restaurants=st.lists(st.integers(2, 9), min_size=1, max_size=20),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_texts_on_a_restaurant_are_at_one_client(restaurants, share, seed):
    labels = rng(seed).permutation(np.repeat(np.arange(len(restaurants)), restaurants))
    clients = 1 + int(share * (len(restaurants) - 1))
    parts = partition(labels, clients, "restaurant", rng=rng(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert sum(len(np.unique(labels[part])) for part in parts) == len(restaurants)
    assert max(map(len, parts)) - min(map(len, parts)) <= max(restaurants)


@pytest.mark.parametrize("kind", KINDS)
def test_a_partition_is_its_seed(kind):
    labels = np.arange(500) % 10
    one, same, other = (partition(labels, 7, kind, rng=rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("clients", [1, 10, 333, 2500])
@pytest.mark.parametrize("alpha", [0.01, 1.0, 1e4])
def test_dirichlet_at_the_limits(alpha, clients):
    labels = np.arange(5000) % 100
    parts = partition(labels, clients, "dirichlet", alpha=alpha, rng=rng())
    assert [len(part) for part in parts] == client_sizes(5000, clients)
    assert len(np.unique(np.concatenate(parts))) == 5000


def test_large_alpha_gives_equal_proportions_and_small_alpha_few_classes():
    labels = np.arange(20_000) % 10
    flat = proportions(labels, partition(labels, 10, "dirichlet", alpha=1e4, rng=rng()))
    peaked = proportions(labels, partition(labels, 10, "dirichlet", alpha=0.01, rng=rng()))
    assert np.abs(flat - 0.1).max() < 0.03
    # Half of a client or more is of one class, though several clients may have asked for the same class.
    assert np.median(peaked.max(axis=1)) > 0.5


def test_dirichlet_proportions_have_the_moments_of_the_distribution():
    # Many more images than clients take: no class runs out, so the proportions are the drawn ones.
    alpha, classes, clients = 0.5, 4, 400
    labels = np.arange(80_000) % classes
    found = proportions(labels, partition(labels, clients, "dirichlet", alpha=alpha, rng=rng()))
    variance = (classes - 1) / (classes**2 * (classes * alpha + 1))
    assert found.mean(axis=0) == pytest.approx(np.full(classes, 1 / classes), abs=0.03)
    assert found.var(axis=0).mean() == pytest.approx(variance, rel=0.1)


def test_no_client_bears_the_exhaustion_of_classes_alone():
    # If one client after the other took its images, the last ones would get what is left: proportions of no one's
    # drawing, much flatter than the first one's.
    labels = np.arange(2000) % 10
    peaks = np.stack(
        [proportions(labels, partition(labels, 10, "dirichlet", alpha=0.3, rng=rng(s))).max(axis=1) for s in range(100)]
    )
    assert peaks[:, :3].mean() == pytest.approx(peaks[:, -3:].mean(), rel=0.05)


def test_shards_are_runs_of_the_sorted_labels():
    labels = np.repeat(np.arange(10), 100)
    parts = partition(labels, 5, "shards", shards_per_client=2, rng=rng())
    # Ten shards of one class each: every client has two classes, or one if it got both.
    for part in parts:
        assert set(np.bincount(labels[part], minlength=10)) <= {0, 100, 200}


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_sizes_are_exact_when_shards_do_not_divide_them(shards):
    parts = partition(np.arange(187) % 10, 10, "shards", shards_per_client=shards, rng=rng())
    assert [len(part) for part in parts] == client_sizes(187, 10)


def test_a_shard_count_of_one_cuts_the_sorted_images_once():
    labels = np.repeat(np.arange(3), 35)
    parts = partition(labels, 10, "shards", shards_per_client=1, rng=rng())
    assert sum(len(set(labels[part])) - 1 for part in parts) <= 2


@pytest.mark.parametrize("clients", [0, -3, 501])
def test_impossible_numbers_of_clients_are_refused(clients):
    with pytest.raises(InputError, match="clients"):
        client_sizes(1001, clients)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf"), 1e-300])
def test_impossible_alphas_are_refused(alpha):
    with pytest.raises(InputError, match="alpha"):
        partition(np.arange(10), 2, "dirichlet", alpha=alpha, rng=rng())


@pytest.mark.parametrize("shards", [0, 6])
def test_impossible_shards_are_refused(shards):
    with pytest.raises(InputError, match="1 to 5 shards"):
        partition(np.arange(10), 2, "shards", shards_per_client=shards, rng=rng())


def test_an_unknown_partition_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="iid, dirichlet, shards"):
        partition(np.arange(10), 2, "dirichlett", rng=rng())


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        (0, r"^0 training examples are too few: each client needs two\. Give more training data\.$"),
        (1, r"^1 training example is too few: each client needs two\. Give more training data\.$"),
        (3, r"^3 training examples are too few for 2 clients, each needs two: use at most 1 client\.$"),
    ],
)
def test_the_advice_on_too_few_examples_is_possible(examples, said):
    with pytest.raises(InputError, match=said):
        client_sizes(examples, 2)

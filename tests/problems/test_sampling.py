import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_sage.problems.sampling import balanced_indices, stratified_indices

labels_and_count = st.lists(st.integers(0, 6), min_size=2, max_size=60).flatmap(
    lambda labels: st.tuples(st.just(np.array(labels)), st.integers(1, len(labels)))
)


@settings(deadline=None)
@given(labels_and_count)
def test_balanced_takes_equally_many_as_far_as_there_are(case):
    labels, count = case
    chosen = balanced_indices(labels, count, np.random.default_rng(0))
    supply, taken = np.bincount(labels), np.bincount(labels[chosen], minlength=labels.max() + 1)
    assert len(np.unique(chosen)) == len(chosen) == count
    # A class gives fewer than another (by more than one) only when it has given all.
    assert all(taken[c] >= taken.max() - 1 for c in range(len(supply)) if taken[c] < supply[c])


@settings(deadline=None)
@given(labels_and_count)
def test_stratified_is_proportional_to_within_one(case):
    labels, count = case
    chosen = stratified_indices(labels, count, np.random.default_rng(0))
    supply, taken = np.bincount(labels), np.bincount(labels[chosen], minlength=labels.max() + 1)
    assert len(np.unique(chosen)) == len(chosen) == count
    assert np.all(np.abs(taken - supply * count / len(labels)) < 1)

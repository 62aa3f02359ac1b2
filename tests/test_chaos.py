"""A few of the random kills that `python -m benchmarks.chaos` plays."""

import pytest
from benchmarks.chaos import play


@pytest.mark.slow
def test_killed_at_random_moments_a_run_comes_to_the_same_bits():
    assert play("local", kills=2, seed=1) == 0

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsl_sage.roles.averaging import average


@given(st.integers(1, 20), st.integers(0, 2**31))
def test_the_mean_of_equal_tensors_is_that_tensor(count, seed):
    tensor = torch.randn(7, generator=torch.Generator().manual_seed(seed))
    weights = torch.rand(count, generator=torch.Generator().manual_seed(seed + 1)).add(0.01).tolist()
    assert torch.equal(average([{"w": tensor}] * count, weights)["w"], tensor)


def test_weights_need_not_sum_to_one():
    mean = average([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}], [500.0, 1000.0])
    assert mean["w"].item() == pytest.approx(3.0)


def test_step_counters_are_not_averaged():
    states = [{"num_batches_tracked": torch.tensor(n)} for n in (3, 9, 4)]
    assert average(states, [1, 1, 1])["num_batches_tracked"].equal(torch.tensor(9))


def test_a_name_is_averaged_over_those_who_hold_it():
    states = [{"a": torch.tensor([1.0])}, {"a": torch.tensor([3.0]), "b": torch.tensor([5.0])}]
    mean = average(states, [1, 1])
    assert mean["a"].item() == 2
    assert mean["b"].item() == 5

from types import SimpleNamespace

import pytest
import torch

from fsl_sage.precision import all_finite, wide


def test_sums_are_in_float64_where_the_device_has_it():
    assert wide(torch.ones(2)).dtype == torch.float64
    asked = []
    phone = SimpleNamespace(device=SimpleNamespace(type="mps"), to=lambda dtype: asked.append(dtype))
    wide(phone)
    assert asked == [torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 11])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, bad: float, place: int) -> None:
    """Wherever it stands, also beside the largest finite numbers and in a transposed tensor."""
    numbers = torch.full((12,), torch.finfo(dtype).max, dtype=dtype)
    numbers[::2] = torch.finfo(dtype).min
    assert all_finite(numbers)
    numbers[place] = bad
    assert not all_finite(numbers)
    assert not all_finite(numbers.view(3, 4).T)


def test_nothing_and_integers_are_finite() -> None:
    assert all_finite(torch.empty(0))
    assert all_finite(torch.arange(3))
    assert all_finite(torch.empty(3, device="meta"))

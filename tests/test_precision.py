from types import SimpleNamespace

import torch

from fsl_sage.precision import wide


def test_sums_are_in_float64_where_the_device_has_it():
    assert wide(torch.ones(2)).dtype == torch.float64
    asked = []
    phone = SimpleNamespace(device=SimpleNamespace(type="mps"), to=lambda dtype: asked.append(dtype))
    wide(phone)
    assert asked == [torch.float32]

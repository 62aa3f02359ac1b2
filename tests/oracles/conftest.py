from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fsl_sage.config import Config
from tests.conftest import merge

SUBJECT: dict[str, Any] = {
    "rounds": 3,
    "align_every": 2,  # rounds 0 and 2
    "workers": 1,
    "precision": "float64",
    "batch_size": 8,
    "data": {"train_images": 64},  # 22, 21 and 21 for the three clients: weights differ, and the last batch is smaller
    "model": {"name": "tests.oracles.subject:TinyResNet", "cut": "block1"},
    "alignment": {"samples": 20, "steps": 4, "batch_size": 8, "start": "previous"},
}


@pytest.fixture
def subject(tiny: Callable[..., Config]) -> Callable[..., Config]:
    """Makes the configuration of a run that an oracle can follow, with changes."""

    def make(*changes: Mapping[str, Any], **more: Any) -> Config:
        values = SUBJECT
        for change in (*changes, more):
            values = merge(values, dict(change))
        return tiny(**values)

    return make

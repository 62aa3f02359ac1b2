"""How many runs there is room for."""

from dataclasses import replace

import pytest

from fsl_sage.compare import placement
from fsl_sage.compare.placement import side_by_side
from fsl_sage.config import load_preset


@pytest.mark.parametrize(
    ("cores", "threads", "runs", "jobs", "expected"),
    [
        (8, 1, 20, None, (8, 1)),
        (8, 2, 20, None, (4, 1)),
        (8, 1, 2, None, (2, 4)),
        (8, 1, 20, 3, (3, 2)),
        (1, 4, 9, None, (1, 1)),
    ],
)
def test_runs_and_their_workers_share_the_cores(preset, monkeypatch, cores, threads, runs, jobs, expected):
    monkeypatch.setattr(placement, "_cores", lambda: cores)
    assert side_by_side(replace(load_preset(preset), threads=threads), runs, jobs) == expected

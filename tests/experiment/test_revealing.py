"""The distance correlation by its definition, and that cuts near the image reveal the most."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fsl_sage.config import Config, ModelConfig
from fsl_sage.experiment.cuts import Limits, best, cuts_of, recommend
from fsl_sage.experiment.revealing import distance_correlation, sample
from fsl_sage.models import MODELS
from fsl_sage.problems.make import make_dry_problem

SMALL = Config(model=ModelConfig(name="small-cnn"))


def distances(x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, x)


def by_definition(x: torch.Tensor, y: torch.Tensor) -> float:
    """Székely and Rizzo (2013), term by term."""
    n = len(x)

    def centred(a: list[list[float]]) -> list[list[float]]:
        rows, total = [sum(row) for row in a], sum(map(sum, a))
        return [
            [0.0 if i == j else a[i][j] - (rows[i] + rows[j]) / (n - 2) + total / ((n - 1) * (n - 2)) for j in range(n)]
            for i in range(n)
        ]

    a, b = (centred([[math.dist(p, q) for q in z] for p in z]) for z in (x.tolist(), y.tolist()))

    def inner(u: list[list[float]], v: list[list[float]]) -> float:
        return sum(u[i][j] * v[i][j] for i in range(n) for j in range(n))

    return math.sqrt(max(0.0, inner(a, b) / math.sqrt(inner(a, a) * inner(b, b))))


def test_it_is_the_definition() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, dtype=torch.float64, generator=draw)
    y = x[:, :2] + 0.5 * torch.randn(7, 2, dtype=torch.float64, generator=draw)
    assert distance_correlation(distances(x), distances(y)) == pytest.approx(by_definition(x, y), abs=1e-12)


def test_a_turned_and_scaled_copy_reveals_all_and_a_constant_nothing() -> None:
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))[0]
    assert distance_correlation(distances(x), distances(3 * x @ turn + 1)) == pytest.approx(1, abs=1e-12)
    assert distance_correlation(distances(x), torch.zeros(9, 9, dtype=torch.float64)) == 0


def test_cuts_reveal_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = lambda classes, channels: nn.Sequential(  # noqa: E731
        nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, 4, 8, 8), nn.Flatten(), nn.Linear(64, classes)
    )
    monkeypatch.setitem(MODELS, "own", identity)
    first, second, *_ = cuts_of(Config(model=ModelConfig(name="own", auxiliary="full")))
    assert 0.9 < first.revealed <= 1
    assert second.revealed < first.revealed


def test_the_recommendation_weighs_it() -> None:
    table = cuts_of(SMALL)
    chosen = best(table, Limits(), "fsl-sage")
    possible = [row for row in table if row.round_bytes["fsl-sage"] is not None]
    assert chosen.weighed("fsl-sage") == min(row.weighed("fsl-sage") for row in possible)
    shallow = replace(chosen, revealed=0.99, round_bytes={"fsl-sage": 10})  # nearly the image, for few bytes
    deep = replace(chosen, revealed=0.8, round_bytes={"fsl-sage": 100})
    assert best([shallow, deep], Limits(), "fsl-sage") is deep
    assert best([shallow, replace(deep, revealed=0.95)], Limits(), "fsl-sage") is shallow
    said = recommend(table, Limits(), "fsl-sage")
    assert f"It reveals {chosen.revealed:.2f} of 1." in said
    missing = len(table) - len(possible)
    assert missing
    assert f"{missing} of {len(table)} cuts allow no such auxiliary" in said


def test_the_sample_has_the_shape_of_the_problems_images() -> None:
    problem = make_dry_problem(SMALL)
    assert sample(problem, 5).shape == (5, 3, 32, 32)

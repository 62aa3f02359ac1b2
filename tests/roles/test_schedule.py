import math

import pytest

from fsl_sage.config import OptimizerConfig
from fsl_sage.roles.schedule import Schedule


def test_constant():
    schedule = Schedule(OptimizerConfig(), 0.1, rounds=3, steps=4)
    assert {schedule(t, k) for t in range(3) for k in range(4)} == {0.1}


def test_cosine_goes_by_local_steps():
    schedule = Schedule(OptimizerConfig(schedule="cosine"), 1.0, rounds=2, steps=5)
    expected = [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert [schedule(t, k) for t in range(2) for k in range(5)] == pytest.approx(expected, abs=1e-6)


def test_linear_decays_to_its_factor_after_a_warm_up():
    schedule = Schedule(OptimizerConfig(schedule="linear", warmup=0.2, decay=0.5), 1.0, rounds=10, steps=1)
    values = [schedule(t, 0) for t in range(10)]
    assert values[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert values[-1] == pytest.approx(1 - 0.5 * 7 / 8)


@pytest.mark.parametrize("kind", ["step", "exponential"])
def test_decays(kind):
    schedule = Schedule(OptimizerConfig(schedule=kind, decay=0.01), 1.0, rounds=9, steps=1)
    values = [schedule(t, 0) for t in range(9)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(0.01**2 if kind == "step" else 0.01 ** (8 / 9))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_first_step_has_the_rate_that_was_given(rounds):
    schedule = Schedule(OptimizerConfig(schedule="step", decay=0.1), 1.0, rounds=rounds, steps=1)
    assert schedule(0, 0) == 1.0

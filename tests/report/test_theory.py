"""The paper's bounds, computed once more from the steps of its proof."""

import json
import math

import pytest

from fsl_sage import Config, InputError
from fsl_sage.algorithms import resolve
from fsl_sage.cli import main
from fsl_sage.config import from_dict
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.theory import Constants, Theory, as_plain, bounds, theory_of

CONSTANTS = Constants(
    clients=3, local_steps=4, uploads=2, client_lr=0.004, server_lr=0.003, variance=5.0, estimate_variance=2.0,
    heterogeneity=1.5, smoothness=9.0, estimate_smoothness=6.0, client_lipschitz=2.0,
)  # fmt: skip


def line(t, error, cut_error=0.5, gradient=1.0):
    return {
        "round": t, "loss": 2.3 - 0.1 * t, "client_gradient": 0.25 * gradient, "server_gradient": 0.75 * gradient,
        "estimation_error": error, "cut_error": cut_error,
    }  # fmt: skip


def proof(errors, loss, rounds):
    """Theorem 1 by the last lines of its proof: Phi_1 and Phi_2, put together."""
    m, K, Q, eta_L, eta = 3, 4, 2, 0.004, 0.003
    c1 = 0.5 - 20 * K**2 * eta_L**2 * 6.0**2
    c2 = 0.5 - 16 * Q**2 * eta**2 * 9.0**2
    c, c_prime = min(c1, c2), max(c1, c2)
    in_client = eta_L**2 * 2.0 * 9.0 / (2 * m) + 20 * K * eta_L**3 * 6.0**2 * (2.0 + K * 1.5)
    in_server = m * eta**2 * 5.0 * 9.0 / 2 + 16 * Q * m * eta**3 * 9.0**2 * (5.0 + Q * 1.5)
    phi = c_prime * K * (in_client + in_server) / (c**2 * Q * min(eta_L, m * eta))
    error = 3 * K * eta_L / (2 * c * Q * min(eta_L, m * eta)) * sum(errors) / len(errors)
    return loss / (c * min(eta_L, m * eta) * Q * rounds) + error + phi, c


def test_theorem_1_is_that_of_the_proof():
    lines = [line(0, 0.7), line(1, 0.3, gradient=0.4), line(2, 0.2)]
    first = bounds(Config(), CONSTANTS, lines, rounds=3)[0]
    assert first.right == pytest.approx(proof([0.7, 0.3, 0.2], 2.3, 3)[0], rel=1e-12)
    assert first.left == pytest.approx(0.4)


def test_theorem_2_fits_the_smallest_constant_and_the_corollary_agrees_where_alignment_never_ends():
    lines = [line(t, 4 / math.sqrt(t or 1), cut_error=0.5) for t in range(4)]  # eps = 4/sqrt(t), L_zf² eps_star = 2
    config = from_dict({"align_every": 2}, Config())
    _, second, lazy = bounds(resolve(config), CONSTANTS, lines, rounds=4)
    _, c = proof([1], 1, 1)
    weight = 3 * 4 * 0.004 / (2 * c * 2 * 0.004)
    excess = max(math.sqrt(t or 1) * max(4 / math.sqrt(t or 1) - 2, 0) for t in range(4))
    assert second.terms["learning the auxiliary"] == pytest.approx(weight * 2 * excess / 2, rel=1e-12)
    assert second.terms["best auxiliary"] == pytest.approx(weight * 2, rel=1e-12)
    assert lazy.right == pytest.approx(second.right, rel=1e-12)
    stopped = bounds(resolve(from_dict({"align_until": 1}, Config())), CONSTANTS, lines, rounds=4)[2]
    assert stopped.terms["learning the auxiliary"] == pytest.approx(weight * excess * (1 + 1 / 4) / 1, rel=1e-12)


def test_json_has_no_infinity():
    lines = [line(t, 4.0) for t in range(4)]
    found = bounds(resolve(from_dict({"align_until": 0}, Config())), CONSTANTS, lines, rounds=4)
    assert found[2].right == math.inf
    plain = as_plain(Theory(CONSTANTS, lines, 4, found, []))
    assert json.loads(json.dumps(plain, allow_nan=False))["bounds"][2]["right"] is None


def test_step_sizes_beyond_the_limits_have_no_bound():
    large = Constants(**{**CONSTANTS.__dict__, "client_lr": 0.1})
    assert [each.holds for each in CONSTANTS.conditions()] == [True] * 4
    assert [each.holds for each in large.conditions()] == [False, True, False, True]
    assert large.conditions()[0].limit == pytest.approx(1 / (2 * math.sqrt(10) * 4 * 6.0))
    assert all(bound.right is None for bound in bounds(Config(), large, [line(0, 1.0)], rounds=1))


@pytest.fixture
def directory(tmp_path):
    config = from_dict({"optimizer": {"name": "adam"}, "out": str(tmp_path / "run")}, Config())
    made = RunDirectory.create(config)
    theory = {key: value for key, value in line(0, 0.5).items() if key != "round"}
    more = {"variance": 1.0, "estimate_variance": 1.0, "heterogeneity": 1.0, "smoothness": 1.0}
    more |= {"estimate_smoothness": 1.0, "client_lipschitz": 1.0, "local_steps": 4, "uploads": 1}
    metrics = {"round": 0, "test_accuracy": 0.1, "theory": {**theory, **more}}
    made.append(metrics, [])
    return made.path


def test_the_command_prints_tables_and_draws(directory, capsys):
    main(["theory", str(directory)])
    said = " ".join(capsys.readouterr().out.split())
    assert "The theory is about plain SGD; this run used adam." in said
    assert "Theorem 1" in said
    assert "a slip for Phi" in said
    assert (directory / "theory.png").stat().st_size > 5000
    main(["theory", str(directory), "--json"])
    assert json.loads(capsys.readouterr().out)["bounds"][0]["name"] == "Theorem 1"


def test_a_run_without_it_is_refused(tmp_path):
    config = from_dict({"out": str(tmp_path / "run")}, Config())
    made = RunDirectory.create(config)
    made.append({"round": 0}, [])
    with pytest.raises(InputError, match="give --theory N"):
        theory_of(made.path)

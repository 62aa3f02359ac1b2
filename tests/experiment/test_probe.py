"""The theory's quantities against a computation in NumPy, by formulas for a linear model written down by hand."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fsl_sage import Config, InputError, Score, TensorProblem, Tracker, resume, run
from fsl_sage.config import from_dict
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment import probe as probes
from fsl_sage.experiment.federation import Federation
from fsl_sage.experiment.probe import Point, Probe
from fsl_sage.experiment.setup import make_setup

CLIENTS, INPUTS, CUT, OUTPUTS = 3, 5, 4, 2


def problem():
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, INPUTS, generator=draw), torch.randn(60, OUTPUTS, generator=draw)
    return TensorProblem(
        (x[:50], y[:50]),
        (x[50:], y[50:]),
        lambda: nn.Sequential(nn.Linear(INPUTS, CUT, bias=False), nn.Linear(CUT, OUTPUTS, bias=False)),
        F.mse_loss,
        lambda output, y: (output - y).abs().mean(1),
        Score("test_error", higher_is_better=False),
        cut="0",
    )


def config(**changes):
    values = {"clients": CLIENTS, "rounds": 3, "batch_size": 4, "device": "cpu", "model": {"auxiliary": "full"}}
    return from_dict({**values, "precision": "float64", "theory": 1, **changes}, Config())


def by_hand(x, y, client, behind):
    """(loss, z, z_b, the client part's gradient, that of the part behind) of mean (out - y)², all flat."""
    z = x @ client.T
    out = z @ behind.T
    slope = 2 * (out - y) / out.size
    z_b = slope @ behind
    return ((out - y) ** 2).mean(), z.ravel(), z_b.ravel(), (z_b.T @ x).ravel(), (slope.T @ z).ravel()


def expected(batches, before, after, auxiliaries, steps, uploads):
    """Every quantity from its definition. `before` and `after`: (client, server) matrices."""
    losses, errors, cut_errors, variances, estimate_variances, means = [], [], [], [], [], []
    secants = {"smoothness": 0.0, "estimate_smoothness": 0.0, "client_lipschitz": 0.0}
    moved = [np.linalg.norm(a - b) for a, b in zip(after, before, strict=True)]
    for own, auxiliary in zip(batches, auxiliaries, strict=True):
        true = [by_hand(x, y, *before) for x, y in own]
        guess = [by_hand(x, y, before[0], auxiliary) for x, y in own]
        later = [by_hand(x, y, *after) for x, y in own]
        later_guess = [by_hand(x, y, after[0], auxiliary) for x, y in own]
        gradients = np.array([np.concatenate(each[3:]) for each in true])
        estimates = np.array([each[3] for each in guess])
        losses.append(np.mean([each[0] for each in true]))
        means.append(gradients.mean(0))
        errors.append(np.sum((estimates.mean(0) - gradients.mean(0)[: CUT * INPUTS]) ** 2))
        cut_errors.append(np.mean([np.sum((g[2] - t[2]) ** 2) for g, t in zip(guess, true, strict=True)]))
        variances.append(np.mean(np.sum((gradients - gradients.mean(0)) ** 2, 1)))
        estimate_variances.append(np.mean(np.sum((estimates - estimates.mean(0)) ** 2, 1)))
        for t, g, lt, lg in zip(true, guess, later, later_guess, strict=True):
            whole = np.linalg.norm(np.concatenate(lt[3:]) - np.concatenate(t[3:])) / np.hypot(*moved)
            secants["smoothness"] = max(secants["smoothness"], whole)
            estimated = np.linalg.norm(lg[3] - g[3]) / moved[0]
            secants["estimate_smoothness"] = max(secants["estimate_smoothness"], estimated)
            secants["client_lipschitz"] = max(secants["client_lipschitz"], np.linalg.norm(lt[1] - t[1]) / moved[0])
    f = np.mean(means, 0)
    return {
        "loss": np.mean(losses),
        "client_gradient": np.sum(f[: CUT * INPUTS] ** 2),
        "server_gradient": np.sum(f[CUT * INPUTS :] ** 2),
        "estimation_error": np.mean(errors),
        "cut_error": np.mean(cut_errors),
        "variance": max(variances),
        "estimate_variance": max(estimate_variances),
        "heterogeneity": max(np.sum((mean - f) ** 2) for mean in means),
        **secants,
        "local_steps": steps,
        "uploads": uploads,
    }


@pytest.fixture(scope="module")
def measured():
    setup = make_setup(config(upload_every=2), problem())
    draw = np.random.default_rng(0)
    shapes = ((CUT, INPUTS), (OUTPUTS, CUT))
    before, after = ([draw.normal(size=shape) for shape in shapes] for _ in range(2))
    auxiliaries = [draw.normal(size=shapes[1]) for _ in range(CLIENTS)]
    names = {part: next(iter(setup.initial[part])) for part in ("client", "server", "auxiliary")}

    def point(matrices):
        parts = {part: {names[part]: torch.tensor(x)} for part, x in zip(("client", "server"), matrices, strict=True)}
        return Point(parts, {i: {names["auxiliary"]: torch.tensor(x)} for i, x in enumerate(auxiliaries)})

    probe = Probe(setup)
    batches = [[(b.inputs.numpy(), b.target["y"].numpy()) for b in probe._batches(client)] for client in range(CLIENTS)]
    steps = 4  # of 17 examples in batches of 4: the single one left over joins the last
    found = probe.measure(point(before), point(after))
    return found, expected(batches, before, after, auxiliaries, steps, -(-steps // 2))


def test_parameter_fidelity_is_that_of_the_formulas():
    """The first batch's estimate, and its own gradient, against the gradient of all other batches by samples."""
    setup = make_setup(config(), problem())
    draw = np.random.default_rng(2)
    matrices = [draw.normal(size=shape) for shape in ((CUT, INPUTS), (OUTPUTS, CUT))]
    auxiliaries = [draw.normal(size=(OUTPUTS, CUT)) for _ in range(CLIENTS)]
    names = {part: next(iter(setup.initial[part])) for part in ("client", "server", "auxiliary")}
    parts = {part: {names[part]: torch.tensor(x)} for part, x in zip(("client", "server"), matrices, strict=True)}
    point = Point(parts, {i: {names["auxiliary"]: torch.tensor(x)} for i, x in enumerate(auxiliaries)})
    probe = Probe(setup)
    batches = [[(b.inputs.numpy(), b.target["y"].numpy()) for b in probe._batches(client)] for client in range(CLIENTS)]
    cosines, true_cosines = [], []
    for client, own in enumerate(batches):
        others = [batch for number, each in enumerate(batches) for batch in each[int(number == client) :]]
        wanted = sum(len(x) * by_hand(x, y, *matrices)[3] for x, y in others)
        guess, true = (by_hand(*own[0], matrices[0], behind)[3] for behind in (auxiliaries[client], matrices[1]))
        for found, vector in ((cosines, guess), (true_cosines, true)):
            found.append(vector @ wanted / np.linalg.norm(vector) / np.linalg.norm(wanted))
    assert probe.parameter_fidelity(point) == pytest.approx(
        {
            "fidelity_parameters_cosine": np.mean(cosines),
            "fidelity_parameters_cosine_true": np.mean(true_cosines),
        },
        rel=1e-10,
    )


def test_every_quantity_is_that_of_the_formulas(measured):
    found, wanted = measured
    assert set(found) == set(wanted)
    assert found == pytest.approx(wanted, rel=1e-10)


def test_probe_batches_are_the_same_in_every_round_and_no_larger_than_training_batches():
    setup = make_setup(config(), problem())
    first, again = (list(Probe(setup)._batches(1)) for _ in range(2))
    assert len(first) == probes.BATCHES
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, again, strict=True))
    assert {len(batch.inputs) for batch in first} <= {4, 5}


def test_measuring_changes_nothing_else_and_resumes(tmp_path):
    values = {"optimizer": {"name": "sgd", "momentum": 0.0}, "alignment": {"steps": 3, "samples": 16}}
    plain = run(config(theory=None, out=str(tmp_path / "plain"), **values), problem=problem())
    result = run(config(theory=2, out=str(tmp_path / "theory"), **values), problem=problem())
    assert plain.model_file.read_bytes() == result.model_file.read_bytes()
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "theory" in line] == [0, 2]

    class Interrupt(Tracker):
        def round(self, metrics):
            if metrics["round"] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config(theory=2, out=str(tmp_path / "again"), **values), [Interrupt()], problem=problem())
    again = resume(tmp_path / "again", problem=problem())
    assert [line.get("theory") for line in again.metrics] == [line.get("theory") for line in result.metrics]


def test_a_point_has_the_auxiliary_that_each_client_will_use():
    """Before round 0 the initial one; later what still waits for it, here aligned for each client apart."""
    values = {"alignment": {"steps": 3, "samples": 16, "start": "previous", "scope": "client"}, "align_every": 1}
    setup = make_setup(config(**values), problem())
    federation = Federation(setup, LocalEngine(setup))
    name = next(iter(setup.initial["auxiliary"]))
    before = federation.point()
    federation.play_round(0, range(CLIENTS))
    after = federation.point()
    for client in range(CLIENTS):
        assert torch.equal(before.auxiliaries[client][name], setup.initial["auxiliary"][name])
        aligned = federation.engine.server.role.auxiliaries.of(client)
        assert not torch.equal(aligned[name], before.auxiliaries[client][name])
        assert torch.equal(after.auxiliaries[client][name], aligned[name])
    federation.engine.close()


def test_algorithms_without_an_auxiliary_are_refused(tmp_path):
    with pytest.raises(InputError, match="the clients of fedavg have none: give fsl-sage"):
        run(config(algorithm="fedavg", out=str(tmp_path / "run")), problem=problem())

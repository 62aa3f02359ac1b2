"""The laws of steps without a backward pass."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsl_sage.config import Config
from fsl_sage.engines.base import Delivery, Outcome
from fsl_sage.engines.worker import Worker
from fsl_sage.errors import InputError
from fsl_sage.experiment import run
from fsl_sage.experiment.costs import cost
from fsl_sage.experiment.setup import make_setup
from fsl_sage.roles.client import Client


@pytest.fixture
def client(tiny: Callable[..., Config]) -> Callable[..., tuple[Client, object]]:
    """Makes client 0 at its first batch."""

    def make(**changes: object) -> tuple[Client, object]:
        setup = make_setup(tiny(algorithm="heron-sfl", precision="float64", **changes))
        worker = Worker(setup)
        one = Client(
            0,
            setup.examples[0],
            setup.settings,
            worker.workbench,
            received={},
            initial={part: setup.initial[part] for part in setup.algorithm.holds},
            state={},
            trains=setup.algorithm.trained_in(0),
        )
        return one, next(one.batches(0))

    return make


def gradient_of(client: Client, batch: object) -> Tensor:
    """By backpropagation, over all weights that the client trains, as one vector."""
    z = client.forward(batch)
    client.backward(z, client.auxiliary_gradient(z, batch.target))
    parts = ("client", "auxiliary")
    return torch.cat([w.grad.reshape(-1) for part in parts for w in client.parameters(part).values()])


def slope(client: Client, batch: object, u: Tensor, mu: float) -> Tensor:
    _, loss = client.loss(batch, "auxiliary")
    with client.moved(u, mu):
        _, ahead = client.loss(batch, "auxiliary", leaves_trace=False)
    return (ahead - loss) / mu


def test_it_is_exact_on_a_linear_loss(client, monkeypatch):
    """l = a . theta: the slope is a . u, whatever mu."""
    one, batch = client()
    weights = [w for part in ("client", "auxiliary") for w in one.parameters(part).values()]
    coefficients = [torch.randn(w.shape, dtype=torch.float64) for w in weights]

    def linear(batch: object, part: str, *, leaves_trace: bool = True) -> tuple[tuple, Tensor]:
        return (), sum((w.detach() * a).sum() for w, a in zip(weights, coefficients, strict=True))

    monkeypatch.setattr(one, "loss", linear)
    u = one.direction()
    expected = torch.cat([a.reshape(-1) for a in coefficients]) @ u
    for mu in (1e-3, 1.0, 100.0):
        torch.testing.assert_close(slope(one, batch, u, mu), expected, rtol=1e-8, atol=1e-9)


def test_the_slope_tends_to_the_gradient_along_u(client):
    """Its error falls with mu, to that of the difference of two numbers of float64."""
    one, batch = client()
    gradient, u = gradient_of(one, batch), one.direction()
    errors = [abs(float(slope(one, batch, u, mu) - gradient @ u)) for mu in (1e-2, 1e-4, 1e-6)]
    assert errors[0] > 10 * errors[1] > 100 * errors[2]
    assert errors[2] < 1e-6 * float(gradient.norm())


def test_the_mean_over_many_directions_tends_to_the_gradient(client):
    """d s u has the gradient as its mean. Its variance is known: with n directions the relative error of the mean is
    sqrt((d - 1) / n) for s = g . u. Four times as many directions halve it, and five standard errors bound it."""
    one, _ = client(model={"auxiliary": "linear"})
    d = len(one.direction())
    gradient = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total, errors = torch.zeros(d, dtype=torch.float64), {}
    for n in range(1, 401):
        one.step_index = n
        u = one.direction()
        total += d * (gradient @ u) * u
        errors[n] = float((total / n - gradient).norm() / gradient.norm())
    for n in (25, 100, 400):
        expected = ((d - 1) / n) ** 0.5
        assert abs(errors[n] / expected - 1) < 5 / n**0.5  # the spread of chi-squared with n degrees


def test_directions_are_of_length_1_and_differ(client):
    one, _ = client()
    found = []
    for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        one.id, one.round, one.step_index = key
        found.append(one.direction())
    assert all(float(u.norm()) == pytest.approx(1.0, abs=1e-12) for u in found)
    assert all(abs(float(a @ b)) < 0.1 for n, a in enumerate(found) for b in found[:n])


def test_weights_are_back_to_the_bit_and_statistics_stay(client):
    one, batch = client(model={"name": "tests.oracles.subject:TinyResNet", "cut": "block1"})
    before = {part: {n: x.clone() for n, x in one._parts[part].weights().items()} for part in one._parts}
    with one.moved(one.direction(), 0.3):
        one.loss(batch, "auxiliary", leaves_trace=False)
        assert not torch.equal(one._parts["client"].weights()["conv1.weight"], before["client"]["conv1.weight"])
    for part, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(one._parts[part].weights()[name], tensor), name
    one.loss(batch, "auxiliary")
    assert not torch.equal(one._parts["client"].weights()["bn1.running_mean"], before["client"]["bn1.running_mean"])


def test_dropout_is_the_same_in_both_passes(client):
    """Else the difference of the losses would be that of two masks."""
    one, batch = client(model={"name": "tests.algorithms.test_heron_sfl:with_dropout", "cut": "features"})
    assert one._settings.draws
    losses = [one.loss(batch, "auxiliary", leaves_trace=trace)[1] for trace in (True, False)]
    assert torch.equal(*losses)
    one.step_index += 1
    assert not torch.equal(one.loss(batch, "auxiliary")[1], losses[0])


def with_dropout(classes: int) -> nn.Module:
    features = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Dropout(0.5))
    hidden = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(OrderedDict(features=features, hidden=hidden, fc=nn.Linear(32, classes)))


def test_a_client_keeps_no_tensor_for_a_backward_pass(tiny):
    """Nothing is saved at a client. The S-server saves, and so does a client of CSE-FSL: the meter works."""
    saved = {}
    for algorithm in ("heron-sfl", "cse-fsl"):
        setup = make_setup(tiny(algorithm=algorithm))
        kept: list[torch.Size] = []

        def keep(tensor: Tensor, kept: list[torch.Size] = kept) -> Tensor:
            kept.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            uploads: list[object] = []
            outcome = Worker(setup).whole_round(0, 0, {}, Delivery({}, {}), uploads.append)
        assert isinstance(outcome, Outcome)
        assert uploads
        saved[algorithm] = len(kept)
        own = [path for path in outcome.state if path.startswith("optimizer/")]
        assert bool(own) == (algorithm == "cse-fsl")
    assert saved["heron-sfl"] == 0
    assert saved["cse-fsl"] > 0


def test_its_bytes_are_those_of_cse_fsl(tiny):
    table = cost(tiny(algorithm="heron-sfl"), algorithms=["heron-sfl", "cse-fsl"])
    assert table["heron-sfl"] == table["cse-fsl"]


def test_it_learns(tiny):
    config = tiny(
        algorithm="heron-sfl",
        rounds=6,
        data={"train_images": 600, "test_images": 50},
        model={"auxiliary": "linear"},
        optimizer={"lr": 1e-2, "server_lr": 1e-3},
    )
    losses = [line["auxiliary_loss"] for line in run(config).metrics]
    assert losses[-1] < losses[0]


def test_bfloat16_is_refused(tiny):
    with pytest.raises(InputError, match="bf16"):
        run(tiny(algorithm="heron-sfl", precision="bf16"))

"""The equalities by which the algorithms are known to be right."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsl_sage.config import Config
from fsl_sage.experiment import run
from fsl_sage.experiment.setup import make_setup
from fsl_sage.problems.batches import batch_indices
from fsl_sage.problems.make import make_problem
from fsl_sage.problems.parts import build_model
from fsl_sage.records.files import load_tensors
from fsl_sage.seeding import generator


def final_weights(config: Config) -> dict[str, torch.Tensor]:
    return load_tensors(run(config).model_file)[0]


def centralised(config: Config) -> dict[str, torch.Tensor]:
    """Plain training of the unsplit model on the one client's batches: no role, no cut, one optimizer."""
    setup = make_setup(config)
    task, examples = setup.settings.task, setup.examples[0]
    model = build_model(config, make_problem(config), torch.device("cpu")).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    for t in range(config.rounds):
        order = batch_indices(len(examples), config.batch_size, generator(config.seed, "order", 0, t, 0))
        for step, indices in enumerate(order):
            batch = task.training_batch(examples[indices], generator(config.seed, "augment", 0, t, step))
            optimizer.zero_grad()
            F.cross_entropy(model(batch.inputs), batch.target["labels"]).backward()
            optimizer.step()
    return model.state_dict()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("algorithm", ["splitfed-ss", "splitfed-ms", "fedavg"])
@pytest.mark.parametrize("model", ["small-cnn", "resnet18"])
def test_one_client_is_centralised_training_bit_for_bit(tiny, algorithm, model):
    images = 150 if model == "small-cnn" else 34
    config = tiny(algorithm=algorithm, clients=1, data={"train_images": images}, model={"name": model})
    assert_same(final_weights(config), centralised(config))


class Skipping(nn.Module):
    """Cut after `second`, the outputs of the frozen stem and of `first` cross too: stem's passes no gradient on."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.first, self.second = (nn.Conv2d(n, 6, 3, padding=1) for n in (3, 6, 6))
        self.third, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.first(a)
        c = self.third(self.second(b).relu())
        return self.head((c + 2 * a.relu() + 5 * b).mean((2, 3)))


def skipping(classes: int, channels: int) -> nn.Module:
    return Skipping(classes)


@pytest.mark.parametrize("algorithm", ["splitfed-ss", "splitfed-ms", "fedavg"])
def test_each_tensor_that_crosses_gets_its_own_gradient(tiny, algorithm):
    model = {"name": "tests.algorithms.test_laws:skipping", "cut": "second", "frozen": ["stem"]}
    config = tiny(algorithm=algorithm, clients=1, data={"train_images": 34}, model=model)
    found, expected = final_weights(config), centralised(config)
    assert set(expected) - set(found) == {"stem.weight", "stem.bias"}
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_hold_where_a_tensor_that_crosses_passes_no_gradient_on(tiny):
    model = {"name": "tests.algorithms.test_laws:skipping", "cut": "second", "frozen": ["stem"], "auxiliary": "full"}
    held, free = (run(tiny(model=model, hold=hold)).metrics for hold in (0.3, 0.0))
    assert held[-1]["test_loss"] != free[-1]["test_loss"]


class Checkpointed(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Conv2d(n, 6, 3), nn.ReLU()) for n in (3, 6))
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.head(checkpoint(self.second, x, use_reentrant=False).mean((2, 3)))


def checkpointed(classes: int, channels: int) -> nn.Module:
    return Checkpointed(classes)


@pytest.mark.parametrize(
    "changes", [{"algorithm": "splitfed-ss", "joint_step": True}, {"align_at": "start"}, {"hold": 0.1}], ids=str
)
def test_checkpointed_blocks_run_again_with_their_own_clients_weights(tiny, changes):
    """The clients of a worker share a module, and their backward passes come when others' weights are in it."""
    model = {"name": "tests.algorithms.test_laws:checkpointed", "cut": "first", "auxiliary": "full"}
    weights = [final_weights(tiny(workers=workers, model=model, rounds=1, **changes)) for workers in (1, 3)]
    assert_same(*weights)


@pytest.mark.parametrize("algorithm", ["splitfed-ms", "fedavg"])
def test_one_full_batch_sgd_step_is_a_step_with_the_averaged_gradient(tiny, algorithm):
    config = tiny(
        algorithm=algorithm,
        rounds=1,
        batch_size=100,
        data={"augment": False},
        model={"batch_norm": "group"},
        optimizer={"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.0},
    )
    setup = make_setup(config)
    task = setup.settings.task
    model = build_model(config, make_problem(config), torch.device("cpu"))
    # The clients have equally many examples, so the mean of their gradients is the gradient over all examples.
    batch = task.training_batch(torch.arange(150), torch.Generator())
    F.cross_entropy(model(batch.inputs), batch.target["labels"]).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    weights = final_weights(config)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


def test_splitfed_ms_is_fedavg_with_other_traffic(tiny):
    """Every client has its own server-side model in both; where it stands changes no number."""
    assert_same(*(final_weights(tiny(algorithm=name)) for name in ("splitfed-ms", "fedavg")))


def test_lazy_is_fsl_sage_that_stops_aligning(tiny):
    lazy = run(tiny(algorithm="lazy-fsl-sage", align_until=0, rounds=3))
    assert [line["aligned"] for line in lazy.metrics] == [True, False, False]
    full = run(tiny(rounds=3))
    assert [line["aligned"] for line in full.metrics] == [True, True, True]
    same = ("test_loss", "fidelity_cosine", "fidelity_cosine_seen")
    assert [lazy.metrics[0][name] for name in same] == [full.metrics[0][name] for name in same]


def test_alignment_raises_fidelity(tiny):
    result = run(tiny(rounds=1, alignment={"steps": 150, "lr": 1e-2, "samples": 96}, batch_size=32, upload_every=1))
    first = result.metrics[0]
    assert first["fidelity_cosine_seen"] > first["fidelity_cosine"] + 0.15
    assert first["fidelity_nmse_seen"] < first["fidelity_nmse"]


def test_full_auxiliary_with_the_servers_weights_has_fidelity_one(tiny):
    """Started from the server's own weights an auxiliary of its architecture has nothing to learn."""
    config = tiny(rounds=1, model={"auxiliary": "full"}, alignment={"start": "server", "steps": 1, "lr": 1e-12})
    first = run(config).metrics[0]
    assert first["fidelity_cosine_seen"] == pytest.approx(1.0, abs=1e-6)
    assert first["fidelity_nmse_seen"] == pytest.approx(0.0, abs=1e-9)


def test_with_the_servers_own_gradients_fsl_sage_steps_like_splitfed(tiny):
    """In the first step a full auxiliary with the server's weights gives the client the S-server's cut gradients."""
    common = {"local_steps": 1, "rounds": 1, "upload_every": 1, "order": "blocked", "clients": 1, "align_every": 1}
    split = final_weights(tiny(algorithm="splitfed-ss", **common))
    sage = tiny(model={"auxiliary": "full"}, **common)
    setup = make_setup(sage)
    auxiliary, server = (setup.initial[part] for part in ("auxiliary", "server"))
    assert auxiliary.keys() == server.keys()
    assert_same(dict(auxiliary), dict(server))  # a full auxiliary starts as a copy of the server part
    assert_same(final_weights(sage), split)


def test_warm_start_trains_auxiliaries_in_round_0(tiny):
    warm = run(tiny(warm_start=True, align_every=5))
    cse = run(tiny(algorithm="cse-fsl"))
    assert warm.metrics[0]["fidelity_cosine"] == cse.metrics[0]["fidelity_cosine"]
    assert warm.metrics[0]["test_loss"] == cse.metrics[0]["test_loss"]
    assert warm.metrics[1]["test_loss"] != cse.metrics[1]["test_loss"]


@pytest.mark.parametrize(
    "algorithm",
    [
        "fsl-sage",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cse-fsl", "splitfed-ms", "splitfed-ss", "fedavg")),
    ],
)
def test_each_algorithm_learns_from_real_images(tiny, algorithm):
    config = tiny(
        algorithm=algorithm,
        rounds=5,
        align_every=2,
        data={"train_images": 600, "test_images": 100},
        alignment={"samples": 96, "steps": 20},
        optimizer={"lr": 3e-3},
    )
    result = run(config)
    assert result.best_accuracy > 0.2  # ten classes: chance is 0.1
    assert result.metrics[-1]["train_loss"] < result.metrics[0]["train_loss"] - 0.1

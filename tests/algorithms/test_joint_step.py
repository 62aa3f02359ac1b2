"""Joint steps: one step of the S-server for each local step, on the mean of all clients' losses."""

import pytest
import torch
from torch.nn import functional as F

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.experiment import cost, run
from fsl_sage.experiment.setup import make_setup
from fsl_sage.problems.make import make_problem
from fsl_sage.problems.parts import build_model
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.roles.client import local_order
from fsl_sage.roles.s_server import SServer
from tests.algorithms.test_laws import assert_same, final_weights

U = {"cut": "block1,block3"}
LARGE_BATCH = {
    "rounds": 3,
    "local_steps": 1,
    "precision": "float64",
    "data": {"augment": False},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0},
}


def large_batch_sgd(config: Config) -> dict[str, torch.Tensor]:
    """The unsplit model, one step a round on all clients' batches together."""
    setup = make_setup(config)
    model = build_model(config, make_problem(config), torch.device("cpu")).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=config.optimizer.weight_decay)
    for t in range(config.rounds):
        chosen = [own[next(local_order(len(own), config, client, t))] for client, own in enumerate(setup.examples)]
        batch = setup.settings.task.training_batch(torch.cat(chosen), torch.Generator())
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.target["labels"]).backward()
        optimizer.step()
    return model.state_dict()


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [{}, U])
def test_one_local_step_of_equal_batches_is_a_large_batch_step(tiny, cut):
    config = tiny(algorithm="splitfed-ss", joint_step=True, model={"batch_norm": "group", **cut}, **LARGE_BATCH)
    assert_close(final_weights(config), large_batch_sgd(config))


@pytest.mark.parametrize("fault", ["sum", "reply divided"])
def test_the_law_notices_another_scale(tiny, monkeypatch, fault):
    join = SServer.join

    def other(self, client, smashed, share):
        gradients = join(self, client, smashed, 1.0 if fault == "sum" else share)
        return gradients if fault == "sum" else tuple(share * gradient for gradient in gradients)

    monkeypatch.setattr(SServer, "join", other)
    config = tiny(algorithm="splitfed-ss", joint_step=True, model={"batch_norm": "group"}, **LARGE_BATCH)
    with pytest.raises(AssertionError):
        assert_close(final_weights(config), large_batch_sgd(config))


@pytest.mark.parametrize("cut", [{}, U])
def test_one_client_is_splitfed_ss_bit_for_bit(tiny, cut):
    runs = [tiny(algorithm="splitfed-ss", clients=1, joint_step=joint, model=cut) for joint in (False, True)]
    assert_same(*map(final_weights, runs))


def test_bytes_are_those_of_splitfed_ss_and_workers_change_no_bit(tiny):
    plain, *joint = (
        run(tiny(algorithm="splitfed-ss", joint_step=joint, workers=workers))
        for joint, workers in [(False, 1), (True, 1), (True, 3)]
    )
    books = [RunDirectory(result.directory).ledger() for result in (plain, *joint)]
    assert books[0] == books[1] == books[2]
    assert (
        sum(entry.bytes for entry in books[1] if entry.round == 1)
        == cost(joint[0].config, algorithms=["splitfed-ss"])["splitfed-ss"]["bytes_total"]
    )
    keys = ("test_loss", "train_loss", "test_accuracy")
    assert [[line[key] for key in keys] for line in joint[0].metrics] == [
        [line[key] for key in keys] for line in joint[1].metrics
    ]
    assert plain.metrics[-1]["test_loss"] != joint[0].metrics[-1]["test_loss"]


def test_the_clients_must_come_together(tiny):
    with pytest.raises(InputError, match="--joint-step cannot run with --order blocked"):
        run(tiny(algorithm="splitfed-ss", joint_step=True, order="blocked"))

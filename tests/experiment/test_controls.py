"""The control of FSL-SAGE against plain training of the unsplit model whose second part learns now and then."""

import pytest
import torch
from torch.nn import functional as F

from fsl_sage.config import Config
from fsl_sage.experiment import run
from fsl_sage.experiment.setup import make_setup
from fsl_sage.problems.batches import batch_indices
from fsl_sage.problems.make import make_problem
from fsl_sage.problems.parts import build_model
from fsl_sage.records.files import load_tensors
from fsl_sage.seeding import generator

CONTROL = "experiments.controls:TrueGradients"


def naive(config: Config, every: int) -> dict[str, torch.Tensor]:
    """One client, one round: all weights have their gradients, those behind the cut step on every so manieth batch."""
    setup = make_setup(config)
    task, examples = setup.settings.task, setup.examples[0]
    model = (
        build_model(config, make_problem(config), torch.device("cpu"))
        .train()
        .to(next(setup.modules["server"].parameters()).dtype)
    )
    behind = [name for name in model.state_dict() if name in setup.modules["server"].state_dict()]
    parameters = dict(model.named_parameters())
    sides = [[p for n, p in parameters.items() if (n in behind) == server] for server in (False, True)]
    client, server = (torch.optim.Adam(side, lr=1e-3, weight_decay=1e-4) for side in sides)
    order = batch_indices(len(examples), config.batch_size, generator(config.seed, "order", 0, 0, 0))
    for step, indices in enumerate(order):
        batch = task.training_batch(examples[indices], generator(config.seed, "augment", 0, 0, step))
        before = {name: model.state_dict()[name].clone() for name in behind}
        model.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.target["labels"]).backward()
        client.step()
        if step % every == 0:
            server.step()
        else:  # statistics too are as they were
            model.load_state_dict(before, strict=False)
    return model.state_dict()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_server_learns_from_its_own_uploads_alone(tiny, every):
    changes = {"algorithm": CONTROL, "clients": 1, "rounds": 1, "upload_every": every}
    config = tiny(**changes, model={"name": "tests.oracles.subject:TinyResNet", "cut": "block1"}, precision="float64")
    found = load_tensors(run(config).model_file)[0]
    for name, expected in naive(config, every).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9, msg=name)


def test_with_every_upload_it_is_splitfed_ss(tiny):
    one, other = (tiny(algorithm=name, upload_every=1) for name in (CONTROL, "splitfed-ss"))
    assert [r["test_loss"] for r in run(one).metrics] == [r["test_loss"] for r in run(other).metrics]

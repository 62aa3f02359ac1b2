"""AdaptSFL with a cut for each client against its oracle, and faults that this notices."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from fsl_sage.config import Config
from fsl_sage.engines.server import HostedServer
from fsl_sage.experiment.federation import Federation
from fsl_sage.roles.s_server import SServer
from tests.oracles import FAMILY
from tests.oracles.given import Found, Tensors
from tests.oracles.models import Block, image_loss, image_terms
from tests.oracles.subject import compare, given_for, run_of
from tests.oracles.test_faults import lost_optimizer_state, moved_statistics, wrong_weight
from tests.oracles.test_images import DIRICHLET, SETTINGS
from tests.oracles.test_turns_and_joint_steps import averaged_too_early, old_part_kept, own_part_lost

Patch = pytest.MonkeyPatch
BLOCKS = {"relu": 1, "block1": 2, "block2": 3, "block3": 4}
"""How many blocks of the row below are at a client with this cut."""
SGD = {"optimizer": {"name": "sgd", "lr": 1e-2, "weight_decay": 0.1, "server_lr": 3e-3}}
VARIANTS = {
    "three cuts": (("block1", "relu", "block3"), {}),
    "two cuts, SGD": (("block2", "block1", "block1"), SGD),
    "every second round": (("relu", "block2", "block1"), {"average_every": 2}),
    "new optimizers": (("block1", "block2", "block2"), {"average_every": 2, "client_optimizer": "reset"}),
}


def row() -> nn.Sequential:
    """The subject as a row of blocks, in plain torch.nn."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    blocks = [Block(8, 16, 2), Block(16, 32, 2), Block(32, 48, 2)]
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))
    return nn.Sequential(stem, *blocks, end).double()


def in_row(tensors: Tensors) -> Tensors:
    """The subject's tensors under the names that they have in the row."""
    prefixes = {"conv1.": "0.0.", "bn1.": "0.1.", "fc.": "4.2.", **{f"block{n}.": f"{n}." for n in (1, 2, 3)}}
    start = {name: next(each for each in prefixes if name.startswith(each)) for name in tensors}
    return {prefixes[start[name]] + name.removeprefix(start[name]): x for name, x in tensors.items()}


def check(config: Config) -> None:
    """A run of the package and the oracle: weights to 1e-9 at F-server, S-server and clients, and the same bytes."""
    setup, found, orders = run_of(config)
    given = given_for(config, setup, orders, {}, image_loss, image_terms)
    initial = {**setup.initial["client"], **setup.initial["server"]}
    given = replace(
        given,
        parts={"blocks": row},
        initial={"blocks": in_row({name: x.clone() for name, x in initial.items()})},
        cuts=[BLOCKS[cut] for cut in setup.cuts],
    )
    compare(renamed(found), FAMILY["adaptsfl"](given))


def renamed(found: Found) -> Found:
    clients = {client: in_row(own) for client, own in found.clients.items()}
    return replace(found, client=in_row(found.client), server=in_row(found.server), clients=clients)


def with_cuts(subject: Callable[..., Config], variant: str, setting: dict) -> Config:
    cuts, options = VARIANTS[variant]
    return subject(setting, options, algorithm="adaptsfl", cuts=list(cuts), model={"cut": None})


@pytest.mark.parametrize(
    ("variant", "setting"),
    [
        ("three cuts", "iid"),
        ("two cuts, SGD", "iid"),
        ("three cuts", "Dirichlet, cohort 2 of 3"),
        ("every second round", "Dirichlet, cohort 2 of 3"),
        ("new optimizers", "Dirichlet, cohort 2 of 3"),
    ],
)
def test_variant(subject, variant, setting):
    check(with_cuts(subject, variant, SETTINGS[setting]))


# Faults


def holders_alone(patch: Patch) -> None:
    """The S-server's copy of a layer between the cuts has no part in its average."""
    patch.setattr(Federation, "_completed", lambda self, updates: updates)


def server_not_told(patch: Patch) -> None:
    """The S-server goes on with its own copy after an average."""
    patch.setattr(HostedServer, "take", lambda self, tensors: None)


def mean_over_all(patch: Patch) -> None:
    """A layer between the cuts steps on the mean over all clients, also those that it does not serve."""
    patch.setattr(SServer, "_weigh", lambda self, joined: None)


FAULTS = [lost_optimizer_state, moved_statistics, wrong_weight, holders_alone, server_not_told, mean_over_all]
BETWEEN_AVERAGES = [own_part_lost, averaged_too_early]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_oracle_notices(subject, monkeypatch, fault):
    config = with_cuts(subject, "three cuts", {**DIRICHLET, "rounds": 2})
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check(config)


@pytest.mark.parametrize("fault", [*BETWEEN_AVERAGES, old_part_kept], ids=lambda fault: fault.__name__)
def test_the_oracle_notices_between_averages(subject, monkeypatch, fault):
    config = with_cuts(subject, "every second round", {**DIRICHLET, "cohort": 0.67, "seed": 2})
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check(config)


def test_the_oracle_notices_that_all_get_the_deepest_part(subject, monkeypatch):
    monkeypatch.setattr(Federation, "_held", lambda self, client, part, tensors: tensors)
    with pytest.raises(AssertionError):
        check(with_cuts(subject, "three cuts", {"rounds": 1}))

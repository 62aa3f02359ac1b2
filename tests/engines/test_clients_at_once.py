"""Clients that train as one stack: every number is that of clients one by one, and the ledger is the same."""

import math

import pytest
import torch
from torch import nn

from fsl_sage.algorithms.fsl_sage import FSLSAGE
from fsl_sage.engines import worker
from fsl_sage.engines.base import Delivery
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import run
from fsl_sage.experiment.federation import Federation, draw_cohort
from fsl_sage.experiment.setup import make_setup
from fsl_sage.models.conv import Conv2d
from fsl_sage.models.layout import plain_layers
from fsl_sage.models.norm import BatchNorm2d
from fsl_sage.roles import group as groups
from fsl_sage.roles.group import Group, schedule_of
from fsl_sage.wire.paths import flat
from tests.conftest import merge

TOLERANCE = 1e-9

# Seven clients: in round 0 one is measured by itself, and the others are two groups of three.
STACKED = {"clients": 7, "rounds": 3, "align_every": 2, "precision": "float64", "batch_size": 8}
UNEQUAL = {"data": {"partition": "dirichlet", "alpha": 0.5}, "local_steps": 3}
COHORT = {"cohort": 0.7, "rounds": 4}
RESNET = {
    "clients": 4,
    "rounds": 2,
    "model": {"name": "resnet18"},
    "data": {"train_images": 64, "test_images": 20},
    "optimizer": {"name": "sgd", "lr": 0.01},  # Adam divides a gradient of nearly 0 by its size, rounding and all
    "alignment": {"samples": 16, "steps": 2, "batch_size": 8, "optimizer": "sgd"},
}

LAW = {
    "fsl-sage": {},
    "fsl-sage, unequal clients, cohort": {**UNEQUAL, **COHORT},
    "fsl-sage, an auxiliary for each": {**UNEQUAL, "alignment": {"scope": "client"}},
    "fsl-sage, trained auxiliaries": {"local_auxiliary": True, "warm_start": True},
    "fsl-sage, aligned by direction": {"alignment": {"loss": "cosine"}},
    "fsl-sage, SGD with momentum, cohort": {"optimizer": {"name": "sgd", "lr": 0.02, "weight_decay": 0.01}, **COHORT},
    "fsl-sage, averaged optimizers": {"client_optimizer": "average"},
    "fsl-sage, local BatchNorm": {"model": {"batch_norm": "local"}},
    "fsl-sage, GroupNorm": {"model": {"batch_norm": "group"}},
    "fsl-sage, coded": {"codec": {"preset": "balanced"}},
    "fsl-sage, blocked": {"order": "blocked", "optimizer": {"schedule": "cosine", "label_smoothing": 0.1}},
    "lazy-fsl-sage": {"algorithm": "lazy-fsl-sage", "align_until": 0, "data": {"class_weights": "balanced"}},
    "cse-fsl": {"algorithm": "cse-fsl", **UNEQUAL},
    "local-loss": {"algorithm": "local-loss"},
    "fedavg": {"algorithm": "fedavg", **UNEQUAL, **COHORT},
    "fedprox": {"algorithm": "fedprox", "averaging": {"proximal": 0.5}},
    "fedadam": {"algorithm": "fedadam", "model": {"frozen": ("block1.bn",)}},
    "fedyogi": {"algorithm": "fedyogi"},
    "fsl-sage, ResNet-18": RESNET,
    "fedavg, ResNet-18": {**RESNET, "algorithm": "fedavg"},
}
QUICK = (
    *("fsl-sage, unequal clients, cohort", "fsl-sage, trained auxiliaries", "fsl-sage, averaged optimizers"),
    *("fsl-sage, local BatchNorm", "fsl-sage, coded", "cse-fsl", "fedavg", "fedprox"),
)


@pytest.fixture
def played(tiny):
    """Plays a run with changes: its federation, and the metrics of its rounds."""

    def play(*changes, **more):
        values = STACKED
        for change in (*changes, more):
            values = merge(values, change)
        config = tiny(**values)
        setup = make_setup(config)
        engine = LocalEngine(setup)
        try:
            federation = Federation(setup, engine)
            metrics = [
                {**federation.play_round(t, draw_cohort(config, t)), **federation.evaluate()}
                for t in range(config.rounds)
            ]
            return found_in(federation, metrics)
        finally:
            engine.close()

    return play


@pytest.fixture
def sizes(monkeypatch):
    """The sizes of the groups that were made, those of rehearsals too."""
    made = []

    class Noted(Group):
        def __init__(self, clients, settings):
            made.append(len(clients))
            super().__init__(clients, settings)

    monkeypatch.setattr(worker, "Group", Noted)
    return made


def found_in(federation, metrics):
    """All numbers of a run by name, and its ledger."""
    tensors, values = federation.checkpoint(federation.setup.settings.config.rounds)
    numbers = {f"state/{path}": tensor for path, tensor in tensors.items()}
    numbers |= {f"model/{path}": tensor for path, tensor in flat(federation.weights()).items()}
    for t, row in enumerate(metrics):
        numbers |= {f"metrics/{t}/{name}": value for name, value in row.items()}
    rounds = federation.setup.settings.config.rounds
    ledger = [entry for t in range(-1, rounds) for entry in federation.ledger.entries(t)]
    return numbers, ledger, values


def check(one_by_one, at_once):
    (numbers, ledger, values), (others, other_ledger, other_values) = one_by_one, at_once
    assert other_ledger == ledger
    assert other_values == values
    assert others.keys() == numbers.keys()
    for name, number in numbers.items():
        if isinstance(number, torch.Tensor):
            assert others[name].shape == number.shape, name
            off = (others[name].double() - number.double()).abs().max().item() if number.numel() else 0.0
            assert off <= TOLERANCE, f"{name} is off by {off}"
        elif isinstance(number, float):
            assert math.isclose(others[name], number, rel_tol=TOLERANCE, abs_tol=TOLERANCE), f"{name} is off by"
        else:
            assert others[name] == pytest.approx(number, abs=TOLERANCE), f"{name} is off by"


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in LAW]
)
def test_every_number_is_that_of_clients_one_by_one(played, sizes, case):
    one_by_one = played(LAW[case])
    assert sizes == []  # by default nothing is stacked
    check(one_by_one, played(LAW[case], clients_at_once=3))
    assert sizes.count(3) >= 2


def test_the_bits_do_not_depend_on_workers(played):
    (one, ledger, _), (other, other_ledger, _) = (played(clients_at_once=3, workers=workers) for workers in (1, 2))
    assert other_ledger == ledger
    for name, number in other.items():
        same = torch.equal(number, one[name]) if isinstance(number, torch.Tensor) else number == one[name]
        assert same, name


def test_the_bits_do_not_depend_on_where_states_are(tiny):
    memory, files = (run(tiny(**STACKED, clients_at_once=3, client_memory_mib=mib)).metrics for mib in (1024, 0))
    for one, other in zip(memory, files, strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }


# Who trains with whom


def test_groups_have_batches_of_the_same_sizes_and_optimizers_as_far(tiny):
    engine = LocalEngine(make_setup(tiny(clients=6, clients_at_once=2, data={"train_images": 100}, batch_size=8)))
    try:
        assert [len(own) for own in engine.setup.examples] == [17, 17, 17, 17, 16, 16]
        assert engine._groups([0, 1, 2, 3, 4, 5], Delivery({}, {})) == [[0, 1], [2, 3], [4, 5]]
        assert engine._groups([0, 2, 4, 5], Delivery({}, {}, measured=0)) == [[0], [2], [4, 5]]
        step = {"optimizer/client/w/exp_avg": torch.zeros(2), "optimizer/client/w/step": torch.tensor(3.0)}
        engine._clients.put(0, dict(step))
        engine._clients.put(2, {**step, "optimizer/client/w/step": torch.tensor(6.0)})
        engine._clients.put(3, dict(step))
        assert engine._groups([0, 1, 2, 3], Delivery({}, {})) == [[0, 3], [1], [2]]
    finally:
        engine.close()


def test_what_a_client_has_of_its_own_does_not_part_it_from_others():
    own = {"own/auxiliary/w": torch.ones(2), "extra/x": torch.ones(1)}
    assert schedule_of([8, 8], own) == schedule_of([8, 8], {})
    assert schedule_of([8, 8], {}) != schedule_of([8, 7], {})


# An agreement to 1e-9 is worth what it notices


def mixed_up_uploads(patch):
    proper = groups.uploads_of
    patch.setattr(worker, "uploads_of", lambda message, clients: proper(message, clients)[::-1])


def mixed_up_weights(patch):
    proper = groups.take_apart
    patch.setattr(groups, "take_apart", lambda stack, replicas: proper(stack, replicas[::-1]))


def lost_optimizer_state(patch):
    """A group starts with new optimizers."""
    proper = groups.stacked

    def stacked(replicas, make_optimizer):
        stack = proper(replicas, make_optimizer)
        if stack.optimizer is not None:
            stack.optimizer.state.clear()
        return stack

    patch.setattr(groups, "stacked", stacked)


def optimizer_state_of_the_first(patch):
    """All clients of a group get the first one's."""
    proper = groups.take_apart

    def take_apart(stack, replicas):
        proper(stack, replicas)
        for own in replicas:
            own.load_optimizer_state(replicas[0].optimizer_state())

    patch.setattr(groups, "take_apart", take_apart)


def shared_statistics(patch):
    """All clients of a group have the first one's BatchNorm statistics."""
    proper = groups.take_apart

    def take_apart(stack, replicas):
        for name, tensor in stack.tensors.items():
            if "running" in name:
                tensor.copy_(tensor[:1].expand_as(tensor).clone())
        proper(stack, replicas)

    patch.setattr(groups, "take_apart", take_apart)


def statistics_that_stand_still(patch):
    patch.setattr(groups, "in_training", lambda module: module.eval())


def mean_of_the_losses(patch):
    """Every client gets a third of its gradient."""
    proper = Group._losses_of
    patch.setattr(Group, "_losses_of", lambda self, *given: proper(self, *given) / len(self._clients))


def lost_losses(patch):
    proper = Group.hand_back

    def hand_back(self):
        self._losses = self._losses[1:]
        proper(self)

    patch.setattr(Group, "hand_back", hand_back)


FAULTS = [
    mixed_up_uploads,
    mixed_up_weights,
    lost_optimizer_state,
    optimizer_state_of_the_first,
    shared_statistics,
    statistics_that_stand_still,
    mean_of_the_losses,
    lost_losses,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(played, monkeypatch, fault):
    shorter = {"rounds": 2, "clients": 4, "data": {"train_images": 64}}
    one_by_one = played(shorter)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check(one_by_one, played(shorter, clients_at_once=3))


# Failures


def test_the_client_whose_numbers_are_not_finite_is_named(played, monkeypatch):
    proper = Group.hand_back

    def hand_back(self):
        self._losses[0][1] = math.nan
        proper(self)

    monkeypatch.setattr(Group, "hand_back", hand_back)
    with pytest.raises(TrainingError, match="Client 2 failed in round 0: its client loss became nan"):
        played(clients_at_once=3)  # 1 and 2 are the first group: 0 is measured, and the others have fewer images


def test_a_failure_of_a_group_names_its_clients(played, monkeypatch):
    def fails(self):
        raise ValueError("too much")

    monkeypatch.setattr(Group, "hand_back", fails)
    with pytest.raises(
        TrainingError, match=r"Client 1 failed in round 0: ValueError: too much .*clients 1, 2 train as one"
    ):
        played(clients_at_once=3, workers=1)


# What is refused


class OwnRound(FSLSAGE):
    """An algorithm with a local round of its own."""

    def local_round(self, client, t):
        yield from super().local_round(client, t)


REFUSED = {
    "engine": ({"engine": "ray"}, "--engine ray"),
    "clients wait": ({"algorithm": "splitfed-ms"}, "--algorithm splitfed-ms"),
    "heron-sfl": ({"algorithm": "heron-sfl"}, "--algorithm heron-sfl"),
    "fedgkt": ({"algorithm": "fedgkt"}, "--algorithm fedgkt"),
    "own": ({"algorithm": "tests.engines.test_clients_at_once:OwnRound"}, "OwnRound: its local round is a single"),
    "align at start": ({"align_at": "start"}, "clients that wait: they wait for the auxiliary"),
    "hold": ({"hold": 0.1}, "--hold 0.1"),
    "scaffold": ({"algorithm": "scaffold", "optimizer": {"name": "sgd", "lr": 0.01}}, "--averaging.control-variates"),
    "U-shape": ({"algorithm": "fedavg", "model": {"cut": "block1,block3"}}, "--model.cut block1,block3"),
    "ridge": ({"model": {"auxiliary": "ridge"}}, "--model.auxiliary ridge"),
    "bf16": ({"precision": "bf16"}, "--precision bf16"),
    "drop": ({"on_client_failure": "drop"}, "--on-client-failure drop"),
    "dropout": ({"model": {"name": "tests.engines.test_local:with_dropout", "cut": "0", "auxiliary": "full"}}, "draws"),
    "no vmap": ({"model": {"name": "tests.engines.test_clients_at_once:looks_at_values", "cut": "0"}}, "torch.vmap"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_group_cannot_do_is_refused_before_anything_runs(tiny, case):
    changes, said = REFUSED[case]
    with pytest.raises(
        InputError, match=rf"--clients-at-once 3 cannot run with .*{said}.*[.] Give --clients-at-once 1"
    ):
        make_setup(tiny(clients_at_once=3, **changes))


class LooksAtValues(nn.Linear):
    """Its way depends on the numbers, of which a stack has several at once."""

    def forward(self, input):
        return super().forward(input if input.sum() > 0 else -input)


def looks_at_values(classes, channels):
    layers = nn.Conv2d(channels, 4, 3, stride=4), nn.Flatten(), LooksAtValues(256, 32), nn.Linear(32, classes)
    return nn.Sequential(*layers)


def test_a_group_that_is_asked_for_more_says_so(tiny):
    setup = make_setup(tiny())
    client = worker.Worker(setup)._client(0, 0, {}, Delivery(setup.initial, {}))
    group = Group([client, client], setup.settings)
    calls = {
        "own_examples": (),
        "output": ("client",),
        "infer": (None, "auxiliary"),
        "task_loss": (None, {}),
        "minimise": (None,),
        "head_gradient": ((), {}),
        "gradient": ("auxiliary", (), None),
        "take_hold": (),
        "held": (None, (), (), 1.0),
        "loss": (None, "auxiliary"),
        "direction": (),
        "moved": (None, 1.0),
        "move": (None, 1.0),
        "replace": ("auxiliary", {}),
        "optimizer_state": ("client",),
        "set_optimizer_state": ("client", {}),
    }
    for method, given in calls.items():
        with pytest.raises(NotImplementedError, match=f"as one have no `{method}`"):
            getattr(group, method)(*given)


# Plain layers


def test_layers_are_plain_only_within_the_context():
    layers = nn.Sequential(Conv2d(3, 4, 3, padding=1), BatchNorm2d(4))
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
    plain.load_state_dict(layers.state_dict())
    x = torch.randn(2, 3, 4, 4)
    with plain_layers(), plain_layers():
        inside = layers(x)
    assert torch.equal(inside, plain(x))
    assert inside.is_contiguous()
    assert layers(x).is_contiguous(memory_format=torch.channels_last)

"""Split learning in turn, CPSL, joint steps and local losses against their oracles, and faults that these notice."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fsl_sage.algorithms.base import Algorithm
from fsl_sage.algorithms.cpsl import CPSL
from fsl_sage.algorithms.joint import JointSplitFed, joint_step
from fsl_sage.algorithms.local_loss import LocalLoss
from fsl_sage.algorithms.relay import Relay
from fsl_sage.config import Config
from fsl_sage.engines.base import Setup
from fsl_sage.engines.worker import Worker
from fsl_sage.experiment.federation import Federation, draw_cohort
from fsl_sage.roles.client import Client
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.s_server import SServer
from fsl_sage.wire.message import Smashed
from tests.oracles import FAMILY
from tests.oracles.given import Found, Given
from tests.oracles.models import image_loss, image_terms
from tests.oracles.subject import Orders, compare, given_for, run_of
from tests.oracles.test_faults import lost_optimizer_state, moved_statistics, notices, skipped_upload, wrong_weight
from tests.oracles.test_images import DIRICHLET, PARTS, SETTINGS

Patch = pytest.MonkeyPatch
SGD = {"optimizer": {"name": "sgd", "lr": 1e-2, "weight_decay": 0.1}}
VARIANTS = {
    "sl": {"algorithm": "sl"},
    "sl, optimizer handed on": {"algorithm": "sl", "hands_on_optimizer": True},
    "sl, alternate": {"algorithm": "sl", "alternate": True},
    "sl, alternate, SGD handed on": {"algorithm": "sl", "alternate": True, "hands_on_optimizer": True, **SGD},
    "joint step": {"algorithm": "splitfed-ss", "joint_step": True, "optimizer": {"server_lr": 3e-4}},
    "local-loss": {"algorithm": "local-loss", "optimizer": {"auxiliary_weight_decay": 0.0, "server_lr": 3e-4}},
    "sl, new optimizers": {"algorithm": "sl", "client_optimizer": "reset"},
    "local-loss, new optimizers": {"algorithm": "local-loss", "client_optimizer": "reset", **SGD},
    "local-loss, shared server": {"algorithm": "local-loss", "shared_server": True},
    "cpsl": {"algorithm": "cpsl"},
    "cpsl, one cluster, own reply": {"algorithm": "cpsl", "cluster_size": 3, "own_reply": True},
    "cpsl, drawn, optimizer handed on": {"algorithm": "cpsl", "draw_clusters": True, "hands_on_optimizer": True},
    "adaptsfl": {"algorithm": "adaptsfl", "average_every": 2},
    "adaptsfl, never averaged": {"algorithm": "adaptsfl", "average_every": 9, **SGD},
    "cpsl, SGD handed on": {"algorithm": "cpsl", "hands_on_optimizer": True, "own_reply": True, **SGD},
}


def check(config: Config, *, bytes: bool = True) -> None:
    """A run of the package and its oracle: weights to 1e-9, and the same bytes."""
    found, expected, _ = found_and_expected(config)
    compare(found, expected, bytes=bytes)


def found_and_expected(config: Config) -> tuple[Found, Found, Orders]:
    """What a run of the package found, what its oracle says, and the order of the alignments' batches."""
    setup, found, orders = run_of(config)
    parts = {part: PARTS[part] for part in setup.initial}
    given = given_for(config, setup, orders, parts, image_loss, image_terms)
    return found, FAMILY[oracle_of(config.algorithm)](replace(given, clusters=clusters(setup, given))), orders


def oracle_of(algorithm: str) -> str:
    return "splitfed-ss-joint" if algorithm == "splitfed-ss" else algorithm


def clusters(setup: Setup, given: Given) -> list[list[list[int]]]:
    """By round, who trains together in CPSL. What the package draws is handed to the oracle as data."""
    if not isinstance(setup.algorithm, CPSL):
        return []
    options, steps = setup.algorithm.options, dict.fromkeys(range(given.clients), 1)
    if options.draw_clusters:
        return [list(map(list, setup.algorithm.turns(t, cohort, steps))) for t, cohort in enumerate(given.cohorts)]
    size = options.cluster_size
    return [[cohort[k : k + size] for k in range(0, len(cohort), size)] for cohort in given.cohorts]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(subject, variant, setting):
    check(subject(SETTINGS[setting], VARIANTS[variant]))


# Faults


def nothing_handed_on(patch: Patch) -> None:
    """Every client starts its turn from the initial x_c."""
    aggregate = Relay.aggregate
    patch.setattr(Relay, "aggregate", lambda self, f_server, updates: aggregate(self, f_server, updates) and {})


def state_left_behind(patch: Patch) -> None:
    """The optimizer's state that is handed on is not taken up."""
    patch.setattr(Client, "set_optimizer_state", lambda self, part, state: None)


def step_counter_lost(patch: Patch) -> None:
    """The optimizer's state is handed on without its step counter, so Adam corrects its bias anew."""
    take = Client.set_optimizer_state

    def without(self: Client, part: str, state: dict[str, torch.Tensor]) -> None:
        take(self, part, {path: torch.zeros_like(x) if path.endswith("/step") else x for path, x in state.items()})

    patch.setattr(Client, "set_optimizer_state", without)


def new_server_optimizer(patch: Patch) -> None:
    """The S-server has a new optimizer for every batch, as in public code."""
    step = Replica.step

    def forgetful(self: Replica, lr: float) -> None:
        if "server" in self.slots_name():
            self.optimizer.state.clear()
        step(self, lr)

    patch.setattr(Replica, "slots_name", lambda self: "server" if "fc.weight" in self.tensors else "", raising=False)
    patch.setattr(Replica, "step", forgetful)


def first_batch_again(patch: Patch) -> None:
    """Alternate mini-batches: a turn takes the round's first batch every time."""
    batches = Client.batches
    patch.setattr(Client, "batches", lambda self, t, steps=None: batches(self, t, steps and range(1)))


def step_on_each_upload(patch: Patch) -> None:
    """The S-server of joint steps takes a step on every upload."""
    patch.setattr(SServer, "join", lambda self, client, upload, share: self.learn(client, upload, cut_gradient=True))
    patch.setattr(SServer, "step", lambda self, step: None)


def summed_loss(patch: Patch) -> None:
    """A joint step on the sum of the losses. Adam hardly notices a scale, but weight decay does."""
    join = SServer.join
    patch.setattr(SServer, "join", lambda self, client, upload, share: join(self, client, upload, 1.0))


def divided_reply(patch: Patch) -> None:
    """The reply of a joint step is a slice of the gradient of the mean loss."""
    join = SServer.join
    patch.setattr(
        SServer, "join", lambda self, client, upload, share: tuple(share * g for g in join(self, client, upload, share))
    )


def concatenated(patch: Patch) -> None:
    """BatchNorm sees the clients' batches of a joint step together, as in CPSL."""
    patch.setattr(
        "fsl_sage.algorithms.joint.joint_step",
        lambda server, uploads: CPSL.on_uploads(_WithOwnReply, server, uploads),
    )


class _WithOwnReply:
    class options:  # noqa: N801
        own_reply = True


def smashed_after_the_step(patch: Patch) -> None:
    """Clients send what their part gives after their step."""

    def local_round(self: LocalLoss, client: Client, t: int) -> object:
        for batch in client.batches(t):
            z = client.forward(batch)
            client.backward(z, client.auxiliary_gradient(z, batch.target))
            client.step()
            yield Smashed(client.forward(batch), batch.target)

    patch.setattr(LocalLoss, "local_round", local_round)


def copies_not_averaged(patch: Patch) -> None:
    """The copy of the last client takes the place of the mean."""

    def last(self: SServer) -> None:
        for client in range(len(self.client_weights)):
            if client in self._copies:
                self.set_weights(self._copies[client].weights())
                self._copies.optimizers[client] = self._copies[client].optimizer_state()
                self._copies.drop(client)

    patch.setattr(SServer, "average_copies", last)


def members_apart(patch: Patch) -> None:
    """BatchNorm sees the batches of a cluster apart."""
    patch.setattr(CPSL, "on_uploads", lambda self, server, uploads: joint_step(server, uploads))


def one_turn(patch: Patch) -> None:
    """All clients train at once."""
    patch.setattr(CPSL, "turns", Algorithm.turns)


def no_average(patch: Patch) -> None:
    """The F-server hands on what the last member of a cluster has sent."""
    average = Federation._average
    patch.setattr(Federation, "_averages_as_they_come", lambda self, t, group: False)
    patch.setattr(Federation, "_average", lambda self, updates: average(self, updates[-1:]))


def own_part_lost(patch: Patch) -> None:
    """Every client starts every round from the newest average, however old that is."""
    state = Client.state

    def forgetful(self: Client, averaged: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return {path: x for path, x in state(self, averaged).items() if not path.startswith("own/")}

    patch.setattr(Client, "state", forgetful)


def old_part_kept(patch: Patch) -> None:
    """A client that was away when there was an average goes on with what it had."""
    patch.setattr(Worker, "_without_older", lambda self, state, received: state)


def averaged_too_early(patch: Patch) -> None:
    """The averages are at the end of rounds 0, I, 2 I, …"""
    patch.setattr(JointSplitFed, "averaged_in", lambda self, t: self.averaged if t % self.average_every == 0 else ())


FAULTS: list[tuple[str, Callable[[Patch], None]]] = [
    *(("sl", fault) for fault in (lost_optimizer_state, moved_statistics, skipped_upload)),
    *(("sl", fault) for fault in (nothing_handed_on, new_server_optimizer)),
    *(("sl, optimizer handed on", fault) for fault in (state_left_behind, step_counter_lost)),
    ("sl, alternate", first_batch_again),
    *(("joint step", fault) for fault in (lost_optimizer_state, moved_statistics, wrong_weight)),
    *(("joint step", fault) for fault in (step_on_each_upload, summed_loss, divided_reply, concatenated)),
    *(("local-loss", fault) for fault in (lost_optimizer_state, moved_statistics, wrong_weight, skipped_upload)),
    *(("local-loss", fault) for fault in (smashed_after_the_step, copies_not_averaged)),
    *(("cpsl", fault) for fault in (lost_optimizer_state, moved_statistics, wrong_weight, skipped_upload)),
    *(("cpsl", fault) for fault in (nothing_handed_on, members_apart, one_turn, no_average)),
    *(("adaptsfl", fault) for fault in (lost_optimizer_state, wrong_weight, own_part_lost, averaged_too_early)),
    *(("cpsl, drawn, optimizer handed on", fault) for fault in (state_left_behind, step_counter_lost)),
]


@pytest.mark.parametrize(("variant", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_oracle_notices(subject, monkeypatch, variant, fault):
    config = subject(DIRICHLET, VARIANTS[variant], rounds=2)
    notices(config, monkeypatch, fault, found_and_expected)


@pytest.mark.parametrize("fault", [None, old_part_kept])
def test_a_client_that_was_away_takes_the_newest_average(subject, monkeypatch, fault):
    """Client 2 is in rounds 0 and 2, and not in round 1, which averages."""
    config = subject(DIRICHLET, VARIANTS["adaptsfl"], cohort=0.67, seed=2)
    assert [draw_cohort(config, t) for t in range(3)] == [[0, 2], [0, 1], [0, 2]]
    if fault is None:
        check(config)
        return
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check(config)


@pytest.mark.parametrize("kind", ["client model", "optimizer state", "cut gradients"])
def test_the_oracle_notices_a_byte_that_was_not_billed(subject, monkeypatch, kind):
    from fsl_sage.wire.ledger import Ledger

    bill = Ledger.bill
    monkeypatch.setattr(
        Ledger, "bill", lambda self, t, client, way, what, n: bill(self, t, client, way, what, n - (what == kind))
    )
    with pytest.raises(AssertionError):
        check(subject(VARIANTS["sl, optimizer handed on"]))

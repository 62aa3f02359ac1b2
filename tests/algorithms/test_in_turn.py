"""Split learning in turn, and CPSL: what is handed on, what it costs, and what they are equal to."""

import pytest
import torch
from torch.nn import functional as F

from fsl_sage import ALGORITHMS
from fsl_sage.config import Config
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import cost, resume, run
from fsl_sage.experiment.setup import make_setup
from fsl_sage.problems.make import make_problem
from fsl_sage.problems.parts import build_model
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.roles.client import Client, local_order
from fsl_sage.seeding import generator
from tests.algorithms.test_joint_step import LARGE_BATCH, assert_close, large_batch_sgd
from tests.algorithms.test_laws import assert_same, final_weights
from tests.test_experiment import assert_same_run, interrupt_after

U = {"cut": "block1,block3"}
UNEQUAL = {"data": {"partition": "dirichlet", "alpha": 0.5}}
OPTIMIZERS = {"adam": {}, "momentum": {"name": "sgd", "lr": 0.05}}


def stream(config: Config, *, alternate: bool) -> list[tuple[int, int, int, torch.Tensor]]:
    """(round, client, step, examples) of every batch, in the order in which split learning takes them."""
    setup = make_setup(config)
    batches = [
        (t, client, step, own[places])
        for t in range(config.rounds)
        for client, own in enumerate(setup.examples)
        for step, places in enumerate(local_order(len(own), config, client, t))
    ]
    return sorted(batches, key=lambda batch: (batch[0], batch[2], batch[1])) if alternate else batches


def centralised(config: Config, *, alternate: bool) -> dict[str, torch.Tensor]:
    """Plain training of the unsplit model on that stream: no role, no cut, one optimizer."""
    task = make_setup(config).settings.task
    model = build_model(config, make_problem(config), torch.device("cpu")).train()
    own = config.optimizer
    if own.name == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=own.lr, weight_decay=1e-4, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=own.lr, weight_decay=1e-4, momentum=0.9, fused=True)
    for t, client, step, examples in stream(config, alternate=alternate):
        batch = task.training_batch(examples, generator(config.seed, "augment", client, t, step))
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.target["labels"]).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("alternate", [False, True])
def test_sl_is_centralised_training_on_the_stream_of_batches_bit_for_bit(tiny, alternate, optimizer):
    config = tiny(
        **UNEQUAL, algorithm="sl", hands_on_optimizer=True, alternate=alternate, optimizer=OPTIMIZERS[optimizer]
    )
    assert_same(final_weights(config), centralised(config, alternate=alternate))


def test_sl_in_a_u_shape_is_centralised_training_too(tiny):
    config = tiny(**UNEQUAL, algorithm="sl", hands_on_optimizer=True, model=U)
    assert_same(final_weights(config), centralised(config, alternate=False))


def test_the_law_notices_a_state_that_stays_behind(tiny, monkeypatch):
    monkeypatch.setattr(Client, "set_optimizer_state", lambda self, part, state: None)
    config = tiny(**UNEQUAL, algorithm="sl", hands_on_optimizer=True)
    with pytest.raises(AssertionError):
        assert_same(final_weights(config), centralised(config, alternate=False))


@pytest.mark.parametrize("hands_on", [False, True])
@pytest.mark.parametrize("algorithm", ["sl", "cpsl"])
def test_one_client_is_splitfed_ss_bit_for_bit(tiny, algorithm, hands_on):
    own = tiny(algorithm=algorithm, clients=1, hands_on_optimizer=hands_on)
    assert_same(final_weights(own), final_weights(tiny(algorithm="splitfed-ss", clients=1)))


@pytest.mark.parametrize("hands_on", [False, True])
def test_clusters_of_one_are_split_learning_bit_for_bit(tiny, hands_on):
    common = {"hands_on_optimizer": hands_on, "cohort": 0.67, "rounds": 3}
    cpsl, sl = (
        run(tiny(**UNEQUAL, algorithm="cpsl", cluster_size=1, **common)),
        run(tiny(**UNEQUAL, algorithm="sl", **common)),
    )
    assert_same_run(cpsl.directory, sl.directory)


def test_one_cluster_of_all_is_a_joint_step(tiny):
    """With equal batches and GroupNorm one pass of all is the passes of each. The replies are made equal."""
    equal = {"local_steps": 2, "rounds": 2, "precision": "float64", "model": {"batch_norm": "group"}}
    cpsl = tiny(algorithm="cpsl", cluster_size=3, own_reply=True, **equal)
    assert_close(final_weights(cpsl), final_weights(tiny(algorithm="splitfed-ss", joint_step=True, **equal)))


@pytest.mark.parametrize("own_reply", [False, True])
def test_the_scale_of_cpsls_reply(tiny, own_reply):
    """One step of one cluster: x_s takes a large-batch step; x_c too with its own reply, else a third of it."""
    config = tiny(
        algorithm="cpsl",
        cluster_size=3,
        own_reply=own_reply,
        model={"batch_norm": "group"},
        **LARGE_BATCH | {"rounds": 1},
    )
    config_plain = tiny(algorithm="cpsl", model={"batch_norm": "group"}, **LARGE_BATCH | {"rounds": 1})
    before = {n: x for part in ("client", "server") for n, x in make_setup(config_plain).initial[part].items()}
    client = make_setup(config_plain).initial["client"]
    step = {name: x - before[name] for name, x in large_batch_sgd(config).items()}
    decay = config.optimizer.weight_decay * 0.1
    expected = {}
    for name, change in step.items():
        scale = 1 / 3 if name in client and not own_reply else 1
        expected[name] = before[name] + scale * (change + decay * before[name]) - decay * before[name]
    assert_close(final_weights(config), expected)


def model_transfers(directory, kind):
    """By (round, client): the bytes up and down."""
    moved = {}
    for entry in RunDirectory(directory).ledger():
        if entry.kind == kind:
            moved[entry.round, entry.client, entry.direction] = entry.bytes
    return moved


@pytest.mark.parametrize("algorithm", ["sl", "cpsl"])
def test_a_turn_is_one_transfer_up_and_one_down(tiny, algorithm):
    config = tiny(algorithm=algorithm, hands_on_optimizer=True, rounds=3)
    result = run(config)
    setup = make_setup(config)
    model = sum(x.numel() * x.element_size() for x in setup.initial["client"].values())
    trained = sum(p.numel() * p.element_size() for p in setup.modules["client"].parameters())
    everyone = {(t, client, way) for t in range(3) for client in range(3) for way in ("up", "down")}
    assert model_transfers(result.directory, "client model") == dict.fromkeys(everyone, model)
    first_turn = {(0, client, "down") for client in ([0] if algorithm == "sl" else [0, 1])}
    assert model_transfers(result.directory, "optimizer state") == dict.fromkeys(everyone - first_turn, 2 * trained)
    assert not any(entry.round < 0 for entry in RunDirectory(result.directory).ledger())
    expected = cost(config, algorithms=[algorithm])[algorithm]["bytes_total"]
    assert sum(e.bytes for e in RunDirectory(result.directory).ledger() if e.round == 1) == expected


def test_alternate_mini_batches_hand_the_client_part_on_with_each_batch(tiny):
    config = tiny(algorithm="sl", alternate=True)
    result = run(config)
    setup = make_setup(config)
    model = sum(x.numel() * x.element_size() for x in setup.initial["client"].values())
    assert set(model_transfers(result.directory, "client model").values()) == {4 * model}  # 50 images in batches of 16
    expected = cost(config, algorithms=["sl"])["sl"]["bytes_total"]
    assert sum(e.bytes for e in RunDirectory(result.directory).ledger() if e.round == 1) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "sl", "hands_on_optimizer": True},
        {"algorithm": "sl", "alternate": True},
        {"algorithm": "cpsl", "draw_clusters": True, "hands_on_optimizer": True},
    ],
    ids=["sl", "alternate", "cpsl"],
)
def test_resume(tiny, monkeypatch, changes):
    whole = run(tiny(**UNEQUAL, **changes, rounds=3)).directory
    config = tiny(**UNEQUAL, **changes, rounds=3)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


def test_drawn_clusters_are_the_cohort_and_change_from_round_to_round(tiny):
    config = tiny(algorithm="cpsl", cluster_size=3, draw_clusters=True)
    algorithm = ALGORITHMS["cpsl"](config)
    cohort = [0, 2, 3, 5, 6, 7, 9]
    rounds = [algorithm.turns(t, cohort, dict.fromkeys(cohort, 1)) for t in range(4)]
    assert all(sorted(client for cluster in clusters for client in cluster) == cohort for clusters in rounds)
    assert all([len(cluster) for cluster in clusters] == [3, 3, 1] for clusters in rounds)
    assert len({str(clusters) for clusters in rounds}) == 4


class Failing:
    """In round 0 the code of client 1 raises at its second batch."""

    def batches(self, client, t):
        for batch in super().batches(client, t):
            if (client.id, t, client.step_index) == (1, 0, 1):
                raise OSError("no disk")
            yield batch


@pytest.mark.parametrize("alternate", [False, True])
def test_a_client_that_fails_is_left_out(tiny, monkeypatch, alternate):
    monkeypatch.setitem(ALGORITHMS, "sl", type("SL", (Failing, ALGORITHMS["sl"]), {}))
    result = run(tiny(algorithm="sl", alternate=alternate, on_client_failure="drop"))
    assert result.metrics[0]["failures"] == {"1": "OSError: no disk (test_in_turn.py, line 193)"}
    assert "failures" not in result.metrics[1]
    with pytest.raises(TrainingError, match="Client 1 failed"):
        run(tiny(algorithm="sl", alternate=alternate))


def test_impossible_combinations(tiny):
    with pytest.raises(InputError, match="cpsl cannot run with --order blocked"):
        run(tiny(algorithm="cpsl", order="blocked"))
    with pytest.raises(InputError, match="cpsl takes one cut"):
        run(tiny(algorithm="cpsl", model=U))
    with pytest.raises(InputError, match="cluster-size"):
        run(tiny(algorithm="cpsl", cluster_size=0))

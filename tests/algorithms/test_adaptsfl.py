"""AdaptSFL: joint steps with averages at intervals."""

import pytest
import torch

from fsl_sage.config import Config
from fsl_sage.deploy.agreement import Agreement, check
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.experiment import Federation, client_cuts, cost, resume, run
from fsl_sage.experiment.costs import run_cost
from fsl_sage.experiment.cuts import cuts_of
from fsl_sage.experiment.setup import make_setup
from fsl_sage.problems.make import make_problem
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.roles.averaging import average
from tests.algorithms.test_joint_step import LARGE_BATCH, assert_close, large_batch_sgd
from tests.algorithms.test_laws import assert_same, final_weights
from tests.test_experiment import assert_same_run, interrupt_after

UNEQUAL = {"data": {"partition": "dirichlet", "alpha": 0.5}}


def test_one_cut_and_an_average_in_every_round_is_a_joint_step_bit_for_bit(tiny):
    runs = [tiny(algorithm="adaptsfl"), tiny(algorithm="splitfed-ss", joint_step=True)]
    assert_same_run(*(run(config).directory for config in runs))


def test_one_local_step_and_an_average_in_every_round_is_large_batch_sgd(tiny):
    config = tiny(algorithm="adaptsfl", model={"batch_norm": "group"}, **LARGE_BATCH)
    assert_close(final_weights(config), large_batch_sgd(config))


def played(config, cohorts):
    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    for t, cohort in enumerate(cohorts):
        federation.play_round(t, cohort)
    federation.engine.close()
    return federation


def test_beyond_the_last_round_client_parts_stay_local(tiny):
    """Nothing of the client parts travels after the first download; each client has trained its own."""
    config = tiny(algorithm="adaptsfl", average_every=9, rounds=3)
    federation = played(config, [[0, 1, 2]] * 3)
    kinds = {entry.kind for t in range(3) for entry in federation.ledger.entries(t)}
    assert kinds == {"activations", "labels", "cut gradients"}
    own = [parts["client"] for parts in federation.engine.local_tensors().values()]
    assert all(not torch.equal(own[0][name], one[name]) for one in own[1:] for name in own[0] if "weight" in name)
    assert_same(federation.f_server.weights["client"], dict(federation.setup.initial["client"]))
    # What is evaluated, and saved at the end, is the mean that an average would give now.
    assert_same(federation.newest_weights()["client"], average(own, federation.setup.client_weights))


def test_who_was_away_starts_from_the_newest_average_and_others_go_on(tiny):
    """Round 1 averages. Client 2 is away in it, and comes back in round 2 with the average, as client 0 does."""
    config = tiny(algorithm="adaptsfl", average_every=2, rounds=4, local_steps=1)
    federation = played(config, [[0, 1, 2], [0, 1]])
    assert federation.engine.local_tensors()[2]["client"]
    assert not federation.engine.local_tensors()[0]["client"]
    started = {}
    play = federation.engine._threads.workers[0].__class__._client

    def seen(self, t, id, state, delivery):
        client = play(self, t, id, state, delivery)
        started[id] = {name: x.clone() for name, x in client._parts["client"].weights().items()}
        return client

    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(federation.engine._threads.workers[0].__class__, "_client", seen)
        federation.play_round(0, [0, 1, 2])
        own = {id: dict(parts["client"]) for id, parts in federation.engine.local_tensors().items()}
        copies = {id: {name: x.clone() for name, x in tensors.items()} for id, tensors in own.items()}
        federation.play_round(1, [0, 1])
        assert_same(started[0], copies[0])
        assert_same(started[1], copies[1])
        newest = {name: x.clone() for name, x in federation.f_server.weights["client"].items()}
        federation.play_round(2, [0, 2])
        assert_same(started[0], newest)
        assert_same(started[2], newest)
    federation.engine.close()
    downs = {(e.round, e.client) for t in range(3) for e in federation.ledger.entries(t) if e.kind == "client model"}
    assert downs == {(1, 0), (1, 1), (2, 2)}


@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_resume_between_averages(tiny, monkeypatch, batch_norm):
    changes = {"algorithm": "adaptsfl", "average_every": 2, "rounds": 4, "cohort": 0.67, **UNEQUAL}
    changes["model"] = {"batch_norm": batch_norm}
    whole = run(tiny(**changes)).directory
    config = tiny(**changes)
    interrupt_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


def test_its_cost_is_known_beforehand(tiny):
    config = tiny(algorithm="adaptsfl", average_every=3, rounds=7)
    entries = RunDirectory(run(config).directory).ledger()
    assert run_cost(config)["bytes_total"] == sum(entry.bytes for entry in entries)
    assert {entry.round for entry in entries if entry.kind == "client model"} == {2, 5}
    assert (
        sum(entry.bytes for entry in entries if entry.round == 1)
        == cost(config, algorithms=["adaptsfl"])["adaptsfl"]["bytes_total"]
    )


CUTS = ["block2", "block1", "block3"]


def test_equal_cuts_for_each_client_are_one_cut_for_all_bit_for_bit(tiny):
    changes = {"algorithm": "adaptsfl", "average_every": 2, "rounds": 3, "cohort": 0.67, **UNEQUAL}
    one, each = tiny(model={"cut": "block1"}, **changes), tiny(cuts=["block1"] * 3, **changes)
    assert_same_run(run(one).directory, run(each).directory)


@pytest.mark.parametrize("cuts", [CUTS, ["block3", "block1", "block1"]])
def test_with_any_cuts_one_local_step_is_large_batch_sgd(tiny, cuts):
    """Where a layer is trained changes no number but by rounding: the cuts do not matter."""
    config = tiny(algorithm="adaptsfl", cuts=cuts, model={"batch_norm": "group"}, **LARGE_BATCH)
    assert_close(final_weights(config), large_batch_sgd(config))


@pytest.mark.parametrize("averages", [1, 2])
def test_resume_with_a_cut_for_each_client(tiny, monkeypatch, averages):
    changes = {"algorithm": "adaptsfl", "average_every": averages, "rounds": 3, "cohort": 0.67, "cuts": CUTS, **UNEQUAL}
    whole = run(tiny(**changes)).directory
    config = tiny(**changes)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


def test_bytes_with_a_cut_for_each_client_are_known_beforehand(tiny):
    config = tiny(algorithm="adaptsfl", average_every=2, rounds=4, cuts=CUTS)
    entries = RunDirectory(run(config).directory).ledger()
    assert run_cost(config)["bytes_total"] == sum(entry.bytes for entry in entries)
    own = [
        sum(entry.bytes for entry in entries if (entry.client, entry.kind, entry.round) == (client, kind, 1))
        for kind in ("client model", "activations")
        for client in (1, 0, 2)
    ]
    assert own[0] < own[1] < own[2]  # the deeper the cut, the larger the part
    assert own[3] > own[4] > own[5]  # and the smaller its activations


def test_what_is_evaluated_between_averages_is_what_an_average_would_give(tiny):
    """Layers that a client has not are the S-server's."""
    federation = played(tiny(algorithm="adaptsfl", average_every=9, rounds=2, cuts=CUTS), [[0, 1, 2]] * 2)
    newest, at_server = federation.newest_weights(), federation.engine.server.weights()
    own = [parts["client"] for parts in federation.engine.local_tensors().values()]
    name = "block3.conv.weight"
    assert name not in own[0]
    assert name not in own[1]
    expected = average([{name: at_server[name]}, {name: at_server[name]}, {name: own[2][name]}], [1.0] * 3)
    assert torch.equal(newest["client"][name], expected[name])
    assert name not in newest["server"]
    assert newest["client"].keys().isdisjoint(newest["server"])


def test_cuts_are_planned_by_memory(tiny):
    """More memory, a deeper cut that moves fewer bytes; too little is refused with what is needed."""
    memories = {"algorithm": "adaptsfl", "batch_size": 16, "client_memories": ["1MB", "300MB", "1GB"]}
    with pytest.warns(RunWarning, match="Cuts planned by the clients' memories: client 0 at"):
        setup = make_setup(config := tiny(**memories))
    candidates = {each.point.name: each for each in client_cuts._candidates(config, make_problem(config))}
    for client, limit in enumerate((1e6, 3e8, 1e9)):
        chosen = candidates[setup.cuts[client]]
        assert chosen.step.memory <= limit
        fitting = [each.point for each in candidates.values() if each.step.memory <= limit]
        assert client_cuts.moved(chosen.point, 50) == min(client_cuts.moved(point, 50) for point in fitting)
    assert setup.cuts[0] != setup.cuts[1] == setup.cuts[2]
    with pytest.raises(InputError, match="No cut fits the 10 kB of client 2: a step needs at least"):
        make_setup(tiny(algorithm="adaptsfl", client_memories=["3MB", "3MB", "10kB"]))


def test_memories_are_planned_as_cuts_plans_them_and_as_runs_measure_them(tiny):
    """A client gets a cut if its memory is what a step takes there, and another if it is a byte less."""
    config = tiny(algorithm="adaptsfl", batch_size=16, model={"cut": "head.avgpool", "auxiliary": "full"})
    (row,) = [row for row in cuts_of(config) if row.point.name == "head.avgpool"]
    measured = run(config).metrics[0]
    needs = row.client.memory
    assert needs == pytest.approx(measured["client_static_bytes"] + measured["client_working_bytes"], rel=0.1)
    with pytest.warns(RunWarning, match="Cuts planned"):
        cuts = make_setup(
            tiny(algorithm="adaptsfl", batch_size=16, client_memories=[f"{needs}B", f"{needs - 1}B", "1GB"])
        ).cuts
    assert cuts[0] == "head.avgpool"
    assert cuts[1] != "head.avgpool"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cuts": CUTS[:2]}, "--cuts has 2 values for 3 clients"),
        ({"client_memories": ["1MB"]}, "--client-memories has 1 values for 3 clients"),
        ({"client_memories": ["much"] * 3}, "--client-memories much is not possible"),
        ({"cuts": CUTS, "client_memories": ["1GB"] * 3}, "give one of them"),
        ({"cuts": CUTS, "model": {"cut": "block1"}}, "one cut for all clients"),
        ({"cuts": CUTS, "model": {"cut": "block1,block3"}}, "one cut for all clients"),
        ({"cuts": CUTS, "model": {"batch_norm": "local"}}, "--model.batch-norm local"),
        ({"cuts": CUTS, "averaging": {"proximal": 0.1}}, "--averaging.proximal"),
        ({"cuts": CUTS, "codec": {"weights": "int8"}}, "--codec.weights int8"),
        ({"cuts": CUTS, "codec": {"preset": "balanced"}}, "--codec.update"),
        ({"cuts": ["block1", "nowhere", "block2"]}, "nowhere"),
        ({"cuts": CUTS, "model": {"frozen": ["block1"]}}, "weights are all trained"),
    ],
    ids=str,
)
def test_a_cut_for_each_client_is_refused_with_the_reason(tiny, changes, said):
    with pytest.raises(InputError, match=said):
        run(tiny(algorithm="adaptsfl", **changes))


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ("sl", "hands one client part on"),
        ("cpsl", "hands one client part on"),
        ("fedavg", "holds the whole model"),
        ("fedgkt", "features of one shape"),
        ("splitfed-ss", "averages client parts of the same layers"),
    ],
)
def test_other_algorithms_say_why_they_have_one_cut(algorithm, reason):
    with pytest.raises(InputError, match=f"--cuts is an option of adaptsfl, not of {algorithm}: .*{reason}"):
        run(Config(algorithm=algorithm, options={"cuts": CUTS}))


def test_impossible_combinations(tiny):
    with pytest.raises(InputError, match="adaptsfl cannot run with --order blocked"):
        run(tiny(algorithm="adaptsfl", order="blocked"))
    with pytest.raises(InputError, match="--average-every"):
        run(tiny(algorithm="adaptsfl", average_every=0))


class Rare:
    """CSE-FSL that averages in every second round."""

    def averaged_in(self, t):
        return self.averaged if t % 2 else ()

    def trained_in(self, t):
        return self.averaged


def test_no_average_in_some_rounds_is_refused_on_flower(tiny, monkeypatch):
    from fsl_sage import ALGORITHMS

    monkeypatch.setitem(ALGORITHMS, "rare", type("Rare", (Rare, ALGORITHMS["cse-fsl"]), {}))
    with pytest.raises(InputError, match="nothing is averaged"):
        check(tiny(algorithm="rare"), Agreement(examples=(50, 50, 50)))


def test_an_evaluation_leaves_out_clients_that_missed_the_last_average(tiny):
    """Their weights are older than it. In training they get it when they come back."""
    setup = make_setup(tiny(algorithm="adaptsfl", clients=4, average_every=2, rounds=4))
    federation = Federation(setup, LocalEngine(setup))
    try:
        federation.play_round(0, [0, 1])  # without an average
        federation.play_round(1, [2, 3])  # with one, of these two
        found, expected = federation.newest_weights(), federation.weights()
        assert all(torch.equal(found["client"][name], tensor) for name, tensor in expected["client"].items())
        federation.play_round(2, [0, 3])
        later = federation.newest_weights()
        assert any(not torch.equal(later["client"][name], tensor) for name, tensor in expected["client"].items())
    finally:
        federation.engine.close()

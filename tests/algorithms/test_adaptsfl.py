"""AdaptSFL: joint steps with averages at intervals."""

import pytest
import torch

from fsl_sage.deploy.agreement import Agreement, check
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, cost, resume, run
from fsl_sage.experiment.costs import run_cost
from fsl_sage.experiment.setup import make_setup
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
    assert sum(entry.bytes for entry in entries if entry.round == 1) == cost(config)["adaptsfl"]["bytes_total"]


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

"""FSL-SAGE with estimators of its own: what it refuses, what it costs, and that a hold begins at nothing."""

import pytest
import torch

from fsl_sage.algorithms import make_algorithm
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, cost, run, run_cost
from fsl_sage.experiment.setup import make_setup
from fsl_sage.roles.client import Client

RIDGE = {"model": {"auxiliary": "ridge"}}
HELD = {"hold": 0.5, "align_every": 1}


@pytest.mark.parametrize("algorithm", ["cse-fsl", "local-loss", "heron-sfl", "fedgkt"])
def test_who_trains_an_auxiliary_cannot_have_a_ridge(tiny, algorithm):
    with pytest.raises(InputError, match=f"ridge cannot run with {algorithm}: its clients train auxiliaries on a loss"):
        make_algorithm(tiny(algorithm=algorithm, **RIDGE))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warm_start": True}, "--warm-start cannot run with --model.auxiliary ridge: it has no loss"),
        ({"local_auxiliary": True}, "--local-auxiliary cannot run with --model.auxiliary ridge: it has no loss"),
        ({"alignment": {"loss": "cosine"}}, "--alignment.loss cosine cannot run with --model.auxiliary ridge"),
        ({"model": {"auxiliary": "ridge:5", "recalibrate": True}}, "become sums and are not stored"),
        ({"hold": -1.0}, "--hold -1 is not possible: give a number from 0 up"),
    ],
)
def test_what_a_ridge_cannot_do(tiny, changes, said):
    with pytest.raises(InputError, match=said):
        make_algorithm(tiny(**{**RIDGE, **changes}))


@pytest.mark.parametrize("option", ["tokens", "max_tokens"])
def test_images_have_no_tokens(tiny, option):
    with pytest.raises(InputError, match="counts the tokens of texts, and cifar10-mini has none"):
        make_setup(tiny(alignment={option: 100}))


def test_an_alignment_by_direction_concerns_those_who_align_alone(tiny):
    """The fitted scale is one number more of the auxiliary, where an algorithm reads --alignment.loss."""
    changes = {"alignment": {"loss": "cosine"}}
    plain, cosine = (cost(tiny(**change), algorithms=["fsl-sage", "cse-fsl"]) for change in ({}, changes))
    assert cosine["cse-fsl"] == plain["cse-fsl"]
    aligned = [each["fsl-sage"]["by_kind_aligning"]["auxiliary"]["down"] for each in (plain, cosine)]
    assert aligned[1] - aligned[0] == 3 * 4


@pytest.mark.parametrize(
    "changes",
    [
        RIDGE,
        {"model": {"auxiliary": "ridge:20"}, "codec": {"auxiliary": "int8"}, "alignment": {"scope": "client"}},
        {**HELD, **RIDGE, "cohort": 0.67},
        {"alignment": {"loss": "cosine"}, "hold": 0.1},
    ],
    ids=["ridge", "random features, coded, by client", "held", "cosine"],
)
def test_the_cost_is_what_a_run_moves(tiny, changes):
    config = tiny(**{"rounds": 3, "align_every": 2, **changes})
    last = run(config).metrics[-1]
    told = run_cost(config)
    assert (told["bytes_total"], told["bytes_paper"]) == (last["bytes_total"], last["bytes_paper"])


def test_a_ridge_has_no_loss_to_report_but_a_fidelity(tiny):
    first, second = run(tiny(**RIDGE)).metrics
    assert first["auxiliary_loss"] is None
    assert first["fidelity_cosine"] == 0  # its weights are 0 before the first alignment
    assert first["fidelity_cosine_seen"] > 0.05
    assert second["fidelity_cosine"] > 0.05


def test_before_the_first_alignment_a_ridge_lets_the_clients_stand_still(tiny):
    config = tiny(rounds=1, optimizer={"weight_decay": 0.0}, **RIDGE)
    setup = make_setup(config)
    engine = LocalEngine(setup)
    playing = Federation(setup, engine)
    try:
        playing.play_round(0, [0, 1, 2])
    finally:
        engine.close()
    weights = playing.f_server.weights["client"]
    trained = setup.settings.trained["client"]
    assert all(torch.equal(weights[name], setup.initial["client"][name]) for name in trained)


def test_sums_take_the_place_of_uploads(tiny):
    """Of an upload only the samples that measure fidelity stay."""
    config = tiny(alignment={"samples": 1000}, upload_every=1, **RIDGE)
    setup = make_setup(config)
    engine = LocalEngine(setup)
    playing = Federation(setup, engine)
    try:
        playing.play_round(0, [0, 1, 2])
        server = engine._server.role
        assert {len(data) for data in server.auxiliaries.data.values()} <= set(range(2, 25))
        assert list(server.auxiliaries._sums) == [-1]
    finally:
        engine.close()


def test_a_hold_pulls_back_to_where_the_auxiliary_came_and_not_at_all_there(tiny, monkeypatch):
    """In the first step of a round that begins with a new auxiliary nothing is added, bit for bit; later something."""
    added = {}
    held = Client.held

    def watched(self, batch, z, gradient, strength):
        found = held(self, batch, z, gradient, strength)
        added[self.id, self.round, self.step_index] = not torch.equal(found[0], gradient[0])
        return found

    monkeypatch.setattr(Client, "held", watched)
    run(tiny(**HELD))
    assert {step for (_, _, step), moved in added.items() if not moved} == {0}
    assert all(not moved for (_, _, step), moved in added.items() if step == 0)


def test_a_hold_keeps_an_old_alignments_weights_over_rounds(tiny, monkeypatch):
    """Aligned in round 0 only: in round 2 the first step is away from where round 1 began."""
    added = {}
    held = Client.held

    def watched(self, batch, z, gradient, strength):
        found = held(self, batch, z, gradient, strength)
        added[self.round, self.step_index] = not torch.equal(found[0], gradient[0])
        return found

    monkeypatch.setattr(Client, "held", watched)
    run(tiny(hold=0.5, align_rounds=[0], rounds=3))
    assert [added[t, 0] for t in range(3)] == [False, False, True]


def test_no_hold_computes_nothing(tiny, monkeypatch):
    monkeypatch.setattr(Client, "held", None)
    monkeypatch.setattr(Client, "take_hold", None)
    run(tiny(rounds=2))


def test_parameter_fidelity_needs_an_average(tiny):
    with pytest.raises(InputError, match="parameter-fidelity"):
        run(tiny(algorithm="fedgkt", parameter_fidelity=1))


def test_parameter_fidelity_needs_an_auxiliary(tiny):
    with pytest.raises(InputError, match="--parameter-fidelity measures how well auxiliaries estimate"):
        run(tiny(algorithm="fedavg", parameter_fidelity=1))

"""Optimizers of clients that keep their state from round to round, or are new in every round."""

import pytest

from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, resume, run
from fsl_sage.experiment.setup import make_setup
from tests.algorithms.test_laws import assert_same, final_weights
from tests.test_experiment import assert_same_run, interrupt_after

PLAIN_SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.0}


@pytest.mark.parametrize("algorithm", ["splitfed-ms", "fsl-sage", "sl", "fedgkt"])
def test_plain_sgd_has_no_state_to_reset(tiny, algorithm):
    few = {"algorithm": algorithm, "optimizer": PLAIN_SGD, "local_steps": 2, "data": {"train_images": 60}}
    runs = [tiny(client_optimizer=each, **few) for each in ("keep", "reset")]
    assert_same(*map(final_weights, runs))


def test_splitfed_ms_is_fedavg_with_new_optimizers_too(tiny):
    """Where a client's server-side model stands changes no number."""
    new = [final_weights(tiny(algorithm=name, client_optimizer="reset")) for name in ("splitfed-ms", "fedavg")]
    assert_same(*new)
    kept = final_weights(tiny(algorithm="fedavg"))
    assert any(not kept[name].equal(weight) for name, weight in new[0].items())


def test_nothing_is_stored(tiny):
    for algorithm in ("fedavg", "splitfed-ms", "cse-fsl"):
        setup = make_setup(tiny(algorithm=algorithm, client_optimizer="reset", local_steps=1))
        federation = Federation(setup, LocalEngine(setup))
        federation.play_round(0, [0, 1, 2])
        assert not any(federation.engine._clients.values())
        if setup.algorithm.has_s_server:
            assert not any(path.startswith("copies/") for path in federation.engine.server.role.state())
        federation.engine.close()


@pytest.mark.parametrize("algorithm", ["fsl-sage", "fedavg"])
def test_the_average_of_one_clients_optimizer_is_its_own(tiny, algorithm):
    few = {"algorithm": algorithm, "clients": 1, "local_steps": 2, "data": {"train_images": 60}}
    assert_same(*(final_weights(tiny(client_optimizer=each, **few)) for each in ("keep", "average")))


def test_an_averaged_optimizer_travels_and_is_billed_apart_and_nothing_is_stored(tiny):
    config = tiny(algorithm="cse-fsl", client_optimizer="average", local_steps=1)
    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    federation.play_round(0, [0, 1, 2])
    assert not any(federation.engine._clients.values())
    billed = {entry.kind: 0 for entry in federation.ledger.entries(0)}
    for entry in federation.ledger.entries(0):
        billed[entry.kind] += entry.bytes
    trained = sum(
        setup.initial[part][name].nbytes for part in ("client", "auxiliary") for name in setup.settings.trained[part]
    )
    assert billed["optimizer state"] == 3 * 2 * 2 * trained  # of 3 clients, up and down, Adam's two moments
    federation.engine.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "splitfed-ms"}, "for each client"),
        ({"algorithm": "fedgkt"}, "averages no weights"),
        ({"algorithm": "sl"}, "--hands-on-optimizer"),
        ({"algorithm": "adaptsfl"}, "several rounds without an average"),
        ({"algorithm": "fedavg", "averaging": {"rule": "median"}}, "let through the one client"),
    ],
)
def test_averages_of_optimizers_are_refused_where_they_make_no_sense(tiny, changes, reason):
    with pytest.raises(InputError, match=f"--client-optimizer average cannot run with .*{reason}"):
        run(tiny(client_optimizer="average", **changes))


@pytest.mark.parametrize(("algorithm", "optimizer"), [("splitfed-ms", "reset"), ("fsl-sage", "average")])
def test_resume(tiny, monkeypatch, algorithm, optimizer):
    changes = {"algorithm": algorithm, "client_optimizer": optimizer, "rounds": 3, "cohort": 0.67}
    whole = run(tiny(**changes)).directory
    config = tiny(**changes)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


@pytest.mark.parametrize("option", ["hands_on_optimizer", "alternate"])
def test_refused_where_a_state_must_last_longer_than_a_turn(tiny, option):
    with pytest.raises(InputError, match="--client-optimizer reset cannot run with --" + option.replace("_", "-")):
        run(tiny(algorithm="sl", client_optimizer="reset", **{option: True}))

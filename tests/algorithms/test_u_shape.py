"""U-shapes: two cuts, the head back at the client, labels that never leave."""

import pytest

from fsl_sage.errors import InputError
from fsl_sage.experiment import cost, resume, run
from fsl_sage.records.run_directory import RunDirectory
from tests.algorithms.test_laws import assert_same, centralised, final_weights

U = {"cut": "block1,block3"}


@pytest.mark.parametrize("algorithm", ["splitfed-ss", "splitfed-ms", "fedavg"])
def test_one_client_is_centralised_training_bit_for_bit(tiny, algorithm):
    config = tiny(algorithm=algorithm, clients=1, model=U)
    assert_same(final_weights(config), centralised(config))


def test_where_the_parts_stand_changes_no_number(tiny):
    """With a model of its own for every client, one cut, two cuts and none at all are the same training."""
    runs = [tiny(algorithm="fedavg"), tiny(algorithm="fedavg", model=U), tiny(algorithm="splitfed-ms", model=U)]
    first, *others = (final_weights(config) for config in runs)
    for other in others:
        assert_same(first, other)


@pytest.mark.parametrize("algorithm", ["splitfed-ss", "splitfed-ms"])
def test_both_exchanges_are_counted_and_labels_stay(tiny, algorithm):
    config = tiny(algorithm=algorithm, model=U)
    result = run(config)
    entries = RunDirectory(result.directory).ledger()
    samples = 2 * 150  # two rounds
    first, second = 32 * 16 * 16 * 4, 128 * 4 * 4 * 4  # bytes of a sample at block1 and at block3
    moved = {}
    for entry in entries:
        moved[entry.kind, entry.direction] = moved.get((entry.kind, entry.direction), 0) + entry.bytes
    assert moved["activations", "up"] == moved["cut gradients", "down"] == samples * first
    assert moved["activations", "down"] == moved["cut gradients", "up"] == samples * second
    assert not any(entry.kind == "labels" for entry in entries)
    costs = cost(config)
    expected = costs[algorithm]
    assert [sum(e.bytes for e in entries if e.round == t) for t in (0, 1)] == [expected["bytes_total"]] * 2
    whole = {"fedavg", "fedprox", "fedadam", "fedyogi", "scaffold"}
    assert set(costs) == {"splitfed-ms", "splitfed-ss", "sl", "adaptsfl", *whole}


def test_the_single_server_learns_and_workers_change_no_bit(tiny):
    weights = [final_weights(tiny(algorithm="splitfed-ss", model=U, workers=workers)) for workers in (1, 3)]
    assert_same(*weights)
    result = run(tiny(algorithm="splitfed-ss", model=U, rounds=5, optimizer={"lr": 3e-3}))
    assert result.metrics[-1]["train_loss"] < result.metrics[0]["train_loss"]


def test_resume(tiny, monkeypatch):
    from tests.test_experiment import assert_same_run, interrupt_after

    changes = {"algorithm": "splitfed-ss", "model": U, "rounds": 3}
    whole = run(tiny(**changes)).directory
    config = tiny(**changes)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)


@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl"])
def test_algorithms_whose_server_computes_the_loss_refuse(tiny, algorithm):
    with pytest.raises(InputError, match="takes one cut"):
        run(tiny(algorithm=algorithm, model=U))


@pytest.mark.parametrize("cut", ["block1,block2,block3", "block1,", ",", "block3,block1"])
def test_impossible_cuts(tiny, cut):
    with pytest.raises(InputError):
        run(tiny(algorithm="fedavg", model={"cut": cut}))

"""The bytes of a whole run, known before it."""

import pytest

from fsl_sage.config import load_preset
from fsl_sage.errors import InputError
from fsl_sage.experiment import cost, run, run_cost
from fsl_sage.wire.ledger import GIB


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 4, "align_every": 2, "warm_start": True},
        {"algorithm": "cse-fsl", "clients": 4, "rounds": 3, "cohort": 0.5},
        {"algorithm": "lazy-fsl-sage", "rounds": 3, "align_until": 1},
        {"algorithm": "cse-fsl", "rounds": 3, "budget_gib": 0.0015},
        {"algorithm": "splitfed-ss", "rounds": 2},
    ],
)
def test_the_cost_of_a_run_is_what_its_ledger_says_afterwards(tiny, changes):
    config = tiny(data={"train_images": 60, "test_images": 20}, **changes)
    last = run(config).metrics[-1]
    sums = ("bytes_total", "bytes_paper", "bytes_whole_models")
    expected = {"rounds": last["round"] + 1, **{name: last[name] for name in sums}, "is_upper_bound": False}
    assert run_cost(config) == expected


def test_a_u_shape_that_no_algorithm_can_have_is_refused(tiny):
    with pytest.raises(InputError, match="nope"):
        cost(tiny(model={"cut": "nope,nada"}))


def test_the_papers_run_stops_in_the_round_that_exceeds_its_budget():
    found = run_cost(load_preset("paper"))
    rounds, aligning = found["rounds"], -(-found["rounds"] // 10)
    assert found["bytes_paper"] == rounds * 138_687_040 + aligning * 84_194_080
    assert found["bytes_paper"] >= 200 * GIB > found["bytes_paper"] - 222_881_120


@pytest.mark.parametrize("algorithm", ["splitfed-ss", "fsl-sage", "fedgkt"])
def test_in_bf16_the_ledger_is_what_the_cost_says(tiny, algorithm):
    config = tiny(algorithm=algorithm, precision="bf16", rounds=1)
    assert run(config).metrics[-1]["bytes_total"] == run_cost(config)["bytes_total"]


def test_a_last_batch_of_one_sample_is_priced(tiny):
    """BatchNorm does not train on one sample; FedGKT's features are those of an evaluation."""
    config = tiny(algorithm="fedgkt", data={"train_images": 34}, clients=2)
    assert cost(config, algorithms=["fedgkt"])["fedgkt"]["bytes_total"]


def test_room_that_crowds_clients_out_makes_an_upper_bound(tiny):
    options = {"scope": "client", "samples": 16}
    for room, bound in ((20, True), (1000, False)):
        config = tiny(alignment={**options, "total_samples": room})
        assert cost(config, algorithms=["fsl-sage"])["fsl-sage"]["is_upper_bound"] is bound

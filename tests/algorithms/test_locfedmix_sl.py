"""LocFedMix-SL: what its two additions change, and what they leave."""

import pytest
import torch

from fsl_sage.config import Config, DataConfig
from fsl_sage.deploy.agreement import Agreement, check
from fsl_sage.errors import InputError
from fsl_sage.experiment import resume, run
from fsl_sage.experiment.costs import cost, run_cost
from fsl_sage.experiment.setup import make_setup
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.wire.message import nbytes

from ..test_experiment import assert_same_run, interrupt_after

PLAIN = {"partners": 0, "decoder": False}
ONE_STEP = {"rounds": 1, "local_steps": 1}


@pytest.fixture
def mix(tiny):
    def make(**changes):
        return tiny(algorithm="locfedmix-sl", **changes)

    return make


def parts(config):
    """The final weights, of the client part and of the server part."""
    setup = make_setup(config)
    weights = load_tensors(run(config).model_file)[0]
    return tuple({name: weights[name] for name in setup.initial[part]} for part in ("client", "server"))


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_without_mixing_and_decoder_it_is_splitfed_with_joint_steps(mix, tiny):
    """Bit for bit, where all clients count the same: the sum with equal shares is the mean."""
    ours, theirs = parts(mix(**PLAIN)), parts(tiny(algorithm="splitfed-ss", joint_step=True))
    assert same(ours[0], theirs[0])
    assert same(ours[1], theirs[1])


def test_the_servers_sum_goes_by_the_clients_shares(mix, tiny):
    """Where clients have different numbers of examples the sum is another one than the uniform mean."""
    uneven = {**ONE_STEP, "data": {"train_images": 151}, "optimizer": {"name": "sgd", "lr": 0.1}}  # 51, 50 and 50
    by_share, mean = parts(mix(**PLAIN, **uneven)), parts(tiny(algorithm="splitfed-ss", joint_step=True, **uneven))
    assert not same(by_share[1], mean[1])
    uniform = parts(mix(**PLAIN, **uneven, weighting="uniform"))
    assert same(uniform[1], parts(tiny(algorithm="splitfed-ss", joint_step=True, weighting="uniform", **uneven))[1])


def test_in_step_1_the_decoder_changes_no_bit_of_the_server(mix):
    client, server = parts(mix(**ONE_STEP))
    without_client, without_server = parts(mix(**ONE_STEP, decoder=False))
    assert same(server, without_server)
    assert not same(client, without_client)


def test_in_step_1_mixing_changes_no_bit_of_a_client(mix):
    """The mixed loss never reaches a client."""
    client, server = parts(mix(**ONE_STEP))
    without_client, without_server = parts(mix(**ONE_STEP, partners=0))
    assert same(client, without_client)
    assert not same(server, without_server)


def test_the_bytes_are_those_of_splitfed_and_the_decoder(mix):
    config = mix(cohort=0.67, rounds=3, data={"partition": "dirichlet", "alpha": 0.5})
    result, setup = run(config), make_setup(config)
    assert run_cost(config)["bytes_total"] == result.metrics[-1]["bytes_total"]
    decoder = nbytes(setup.initial["decoder"])
    entries = [entry for entry in RunDirectory(result.directory).ledger() if entry.kind == "decoder"]
    assert entries
    assert {entry.bytes for entry in entries if entry.direction == "up"} == {decoder}
    table = cost(config, algorithms=["locfedmix-sl", "splitfed-ss"])
    assert set(table["locfedmix-sl"]["by_kind"]) == {*table["splitfed-ss"]["by_kind"], "decoder"}
    for kind, bytes in table["splitfed-ss"]["by_kind"].items():
        assert table["locfedmix-sl"]["by_kind"][kind] == bytes


def test_the_decoder_learns_to_reconstruct(mix):
    losses = [line["auxiliary_loss"] for line in run(mix(rounds=4)).metrics]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


def test_resume_gives_the_same_run(mix, monkeypatch):
    whole = run(mix(rounds=3))
    other = mix(rounds=3, workers=1)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(other)
    monkeypatch.undo()
    assert_same_run(whole.directory, resume(other.out).directory)


def test_more_partners_than_clients_are_all_others(mix):
    assert same(parts(mix(**ONE_STEP, partners=2))[1], parts(mix(**ONE_STEP, partners=9))[1])
    assert same(parts(mix(**ONE_STEP, clients=1))[1], parts(mix(**ONE_STEP, clients=1, partners=0))[1])


def test_what_cannot_be_is_refused(mix):
    with pytest.raises(InputError, match="order interleaved"):
        make_setup(mix(order="blocked"))
    with pytest.raises(InputError, match="texts"):
        make_setup(Config(algorithm="locfedmix-sl", data=DataConfig(name="e2e")))
    with pytest.raises(InputError, match="whole number from 0 up"):
        mix(partners=-1)
    with pytest.raises(InputError, match="takes one cut"):
        make_setup(mix(model={"cut": "block1,block3"}))
    with pytest.raises(InputError, match="cannot run on Flower"):
        check(mix(), Agreement())
    flat = {"name": "tests.algorithms.test_heron_sfl:with_dropout", "cut": "features"}
    with pytest.raises(InputError, match="give --no-decoder"):
        make_setup(mix(model=flat))
    make_setup(mix(model=flat, decoder=False))

"""Clients with server-side models of their own take their rounds by themselves, to the same bits."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsl_sage.algorithms.splitfed_ms import SplitFedMS
from fsl_sage.engines.apart import Turns, folds_copies, most_copies
from fsl_sage.engines.server import HostedServer
from fsl_sage.errors import TrainingError
from fsl_sage.experiment import run
from fsl_sage.experiment.client_disk import disk_needed
from fsl_sage.experiment.setup import make_setup
from fsl_sage.records.files import load_tensors
from fsl_sage.roles.copies import Copies
from tests.test_experiment import assert_same_run

UNEQUAL = {
    "algorithm": "splitfed-ms",
    "clients": 5,
    "rounds": 2,
    "batch_size": 4,
    "data": {"partition": "dirichlet", "alpha": 0.5, "train_images": 80},
}
CHANGES = {
    "optimizers that are kept": {},
    "optimizers that are new": {"client_optimizer": "reset"},
    "float64, whose sums depend on their order": {"precision": "float64"},
    "a cohort": {"cohort": 0.6},
    "one after the other": {"order": "blocked"},
    "codecs": {"codec": {"activations": "int8", "gradients": "int8"}},
    "SGD, all clients alike": {"optimizer": {"name": "sgd", "lr": 0.05}, "weighting": "uniform"},
}


@pytest.fixture
def slow_first_client(monkeypatch):
    """The S-server takes its time with the first client."""
    exchange = HostedServer.exchange

    def slowly(server, uploads, link):
        time.sleep(0.02 if 0 in uploads else 0)
        return exchange(server, uploads, link)

    monkeypatch.setattr(HostedServer, "exchange", slowly)


QUICK = ("optimizers that are kept", "float64, whose sums depend on their order", "one after the other")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CHANGES])
def test_clients_by_themselves_change_no_bit(tiny, monkeypatch, slow_first_client, name):
    """Where a client may fail, no copy is folded: there the clients go step by step together."""
    changes = CHANGES[name]
    together = tiny(**UNEQUAL, **changes, on_client_failure="drop", keep_checkpoint=True)
    run(together)
    held = []
    fold = Copies.fold
    monkeypatch.setattr(
        Copies, "fold", lambda copies, *given: held.append(len(copies.replicas())) or fold(copies, *given)
    )
    for workers in (1, 3):
        held.clear()
        apart = tiny(**UNEQUAL, **changes, client_memory_mib=0, workers=workers, keep_checkpoint=True)
        run(apart)
        assert held
        assert max(held) <= workers
        assert_same_run(together.out, apart.out)
        assert _server_state(together.out).keys() == _server_state(apart.out).keys()
        assert all((x == _server_state(apart.out)[name]).all() for name, x in _server_state(together.out).items())


def _server_state(out):
    (path,) = out.glob("checkpoint*.safetensors")
    tensors = load_tensors(path)[0]
    state = {name: tensor for name, tensor in tensors.items() if "server/" in name}
    assert state
    return state


@pytest.mark.parametrize(("memory", "workers", "count"), [(0, 1, 1), (0, 2, 2), (1024, 1, 5)])
def test_as_many_copies_are_kept_as_fit(tiny, memory, workers, count):
    setup = make_setup(tiny(**UNEQUAL, client_memory_mib=memory, workers=workers))
    assert min(5, most_copies(setup, workers)) == count
    assert disk_needed(make_setup(tiny(**UNEQUAL, client_memory_mib=0, client_optimizer="reset"))) == 0


def play(turns, clients, threads, client):
    """What an engine does: as many threads as there are workers take the clients up in their order."""

    def whole_round(id):
        with turns.giving_up():
            turns.wait_for_room(id)
            client(id)
            turns.end(id)

    with ThreadPoolExecutor(threads) as pool:
        return [future.exception(timeout=10) for future in [pool.submit(whole_round, id) for id in clients]]


def test_one_that_takes_long_is_not_overtaken_by_more_than_fit():
    clients, folded, begun = [2, 3, 5, 7, 11, 13], [], []
    turns = Turns(clients, 3, folded.append)
    others_have_ended = threading.Event()

    def client(id):
        begun.append(id)
        if id == 2:
            others_have_ended.wait(10)
            time.sleep(0.05)
            assert len(begun) == 3
        elif len(begun) == 3:
            others_have_ended.set()

    assert play(turns, clients, 2, client) == [None] * 6
    assert folded == clients


def test_the_first_client_is_the_first_at_the_server():
    """The S-server's first step is measured, and must be the same one in every run."""
    served = []
    turns = Turns(range(4), 4, lambda id: None)

    def client(id):
        time.sleep(0.05 if id == 0 else 0)
        with turns.at_server(id):
            served.append(id)

    assert play(turns, range(4), 4, client) == [None] * 4
    assert served[0] == 0
    assert sorted(served) == [0, 1, 2, 3]


def test_a_first_client_without_uploads_holds_up_nobody():
    turns = Turns(range(3), 3, lambda id: None)

    def client(id):
        if id > 0:
            with turns.at_server(id):
                pass

    assert play(turns, range(3), 3, client) == [None] * 3


def test_nobody_waits_for_a_client_that_failed():
    turns = Turns(range(5), 2, lambda id: None)

    def client(id):
        if id == 0:
            time.sleep(0.05)
            raise TrainingError("the disk is full")
        with turns.at_server(id):
            pass

    assert {str(error) for error in play(turns, range(5), 3, client)} == {"the disk is full"}


@pytest.mark.parametrize(
    "changes",
    [
        {"averaging": {"rule": "median"}},
        {"on_client_failure": "drop"},
        {"algorithm": "splitfed-ss"},
        {"model": {"cut": "block1,block3"}},
    ],
)
def test_rules_that_need_all_copies_get_them(tiny, changes):
    assert not folds_copies(make_setup(tiny(**{**UNEQUAL, **changes})), range(5))
    assert not folds_copies(make_setup(tiny(**UNEQUAL)), [1, 0])  # the average is summed in the order of the clients


class InTwoTurns(SplitFedMS):
    """Half of the clients after the other half."""

    def turns(self, t, cohort, steps):
        return [cohort[:2], cohort[2:]]


def test_clients_that_train_in_turns_keep_their_copies_to_the_end(tiny):
    own = {**UNEQUAL, "algorithm": f"{__name__}:InTwoTurns"}
    config = tiny(**own)
    assert not folds_copies(make_setup(config), range(5))
    assert len(run(config).metrics) == 2

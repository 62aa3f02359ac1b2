"""The local engine: threads change no number, a failed client comes back with what it had."""

import threading
import weakref

import pytest
import torch

from fsl_sage.engines.intake import Intake
from fsl_sage.engines.local import LocalEngine
from fsl_sage.engines.server import HostedServer, NoServer
from fsl_sage.engines.threads import Threads, wait_for_interrupted
from fsl_sage.experiment import Federation
from fsl_sage.experiment.setup import make_setup
from fsl_sage.records.client_store import ClientStore
from fsl_sage.roles.client import Client


@pytest.fixture
def engine(tiny):
    made = []

    def make(**changes):
        made.append(LocalEngine(make_setup(tiny(**changes))))
        return made[-1]

    yield make
    for one in made:
        one.close()


def play(engine, rounds, cohort=(0, 1, 2)):
    federation = Federation(engine.setup, engine)
    for t in rounds:
        federation.play_round(t, list(cohort))
    return federation


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss", "splitfed-ms"])
def test_the_state_that_an_engine_saves_is_the_same_for_any_number_of_workers(engine, algorithm):
    one, three = (play(engine(algorithm=algorithm, workers=count), range(2)) for count in (1, 3))
    assert same(one.engine.state(), three.engine.state())


def test_an_engine_goes_on_from_a_state_whatever_it_did_before(engine):
    whole = play(engine(rounds=3), range(3))
    first = play(engine(rounds=3), range(2))
    tensors, values = first.checkpoint(2)
    used = Federation(whole.setup, engine(rounds=3))
    used.play_round(0, [2])  # something else
    copied = {path: tensor.clone() for path, tensor in tensors.items()}
    assert used.load_checkpoint(copied, values) == 2
    used.play_round(2, [0, 1, 2])
    assert same(used.engine.state(), whole.engine.state())


def test_without_an_s_server_there_is_one_that_knows_nothing(engine):
    federation = play(engine(algorithm="fedavg"), range(1))
    server = federation.engine.server
    assert isinstance(server, NoServer)
    assert (server.weights(), server.fidelity(), server.take_loss(), server.end_of_round(0)) == (None, None, None, [])
    assert server.remarks() == {"aligned": False}


def test_with_one_worker_and_blocked_order_one_clients_uploads_wait(engine, monkeypatch):
    """The numbers are those of several workers, where the S-server learns while clients train."""
    put, most = Intake.put, []
    monkeypatch.setattr(Intake, "put", lambda self, *given: (put(self, *given), most.append(len(self._held))))
    blocked = {"algorithm": "local-loss", "order": "blocked", "batch_size": 10}
    one = play(engine(**blocked, workers=1), range(2))
    assert max(most) == 50 // 10
    several = play(engine(**blocked, workers=3), range(2))
    assert same(one.engine.state(), several.engine.state())


def test_a_model_that_draws_in_forward_has_one_worker(engine):
    drawing = engine(
        model={"name": "tests.engines.test_local:with_dropout", "cut": "0", "auxiliary": "full"}, workers=3
    )
    assert len(drawing._threads.workers) == 1
    assert len(engine(workers=3)._threads.workers) == 3


def with_dropout(classes, channels):
    layers = torch.nn.Conv2d(channels, 4, 3, stride=4), torch.nn.Dropout(0.5), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, classes))


def test_an_interrupt_does_not_wait_for_threads_at_work(tiny):
    threads = Threads(make_setup(tiny()))
    let_go, at_work = threading.Event(), threading.Event()

    def work(item):
        at_work.set()
        return let_go.wait()

    def interrupted():
        try:
            threads.map(work, [0])
            at_work.wait()
            raise KeyboardInterrupt
        finally:
            threads.close()  # would wait for ever for a thread that is let go only below

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        let_go.set()


# Clients that are answered one by one


def test_no_client_waits_for_ever_for_a_run_that_was_interrupted(engine, monkeypatch):
    """Not even if the interrupt comes when they have begun, and before the S-server listens."""
    interrupted = engine(algorithm="splitfed-ss", workers=1)
    usual = interrupted._threads.map

    def map_then_interrupt(call, items):
        usual(call, items)
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted._threads, "map", map_then_interrupt)

    def played():
        try:
            play(interrupted, range(1))
        finally:
            interrupted.close()

    with pytest.raises(KeyboardInterrupt):
        played()
    waiting = threading.Thread(target=wait_for_interrupted, daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"algorithm": "splitfed-ss", "workers": 1}, 1),
        ({"algorithm": "splitfed-ms", "workers": 2}, 2),
        ({"algorithm": "splitfed-ss", "workers": 1, "joint_step": True}, 3),
    ],
    ids=["ss", "ms", "joint"],
)
def test_a_worker_has_one_graph_open(engine, monkeypatch, changes, most):
    """Unless all uploads of a step are answered together."""
    forward, backward, lock, counts = Client.forward, Client.backward, threading.Lock(), [0]

    def count(change):
        with lock:
            counts.append(counts[-1] + change)

    monkeypatch.setattr(Client, "forward", lambda self, batch: (count(1), forward(self, batch))[1])
    monkeypatch.setattr(Client, "backward", lambda self, z, gradient: (backward(self, z, gradient), count(-1))[0])
    play(engine(**changes), range(1))
    assert max(counts) <= most
    assert counts[-1] == 0
    assert most != 3 or max(counts) == 3


def test_nothing_of_a_step_is_in_memory_in_the_next_clients_step(engine, monkeypatch):
    """Neither the batch nor the upload nor the reply, which a client that waits for its next step does not need."""
    forward, backward, seen, left = Client.forward, Client.backward, [], []

    def see(*tensors):
        seen.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors)

    def forward_and_see(self, batch):
        left.append(sum(storage() is not None for storage in seen))
        z = forward(self, batch)
        see(batch.inputs, *z)
        return z

    def backward_and_see(self, z, gradient):
        backward(self, z, gradient)
        see(*gradient)

    monkeypatch.setattr(Client, "forward", forward_and_see)
    monkeypatch.setattr(Client, "backward", backward_and_see)
    play(engine(algorithm="splitfed-ss", workers=1, batch_size=10), range(1))
    assert len(seen) == 3 * len(left)
    assert left == [0] * len(left)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("side", ["server", "store"])
def test_nobody_waits_for_ever_if_the_other_side_fails(engine, monkeypatch, workers, side):
    def fails(*arguments):
        raise OSError("no more")

    owner, name = (HostedServer, "exchange") if side == "server" else (ClientStore, "put")
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(OSError, match="no more"):
        play(engine(algorithm="splitfed-ss", workers=workers), range(1))

"""The pieces of the Ray engine that need no cluster: tensors as arrays, placement."""

import pickle
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray")

import ray
from ray import exceptions

from fsl_sage.config import Config
from fsl_sage.engines.base import LostError, Setup
from fsl_sage.engines.ray import actors, cluster, pool
from fsl_sage.engines.ray.arrays import pack, to_device, unpack
from fsl_sage.engines.ray.cluster import Crew, lay_out
from fsl_sage.engines.ray.engine import RayEngine, longest_first, of_worker, share_out
from fsl_sage.engines.ray.pool import Pool, UnpreparedError, WorkerDiedError
from fsl_sage.engines.worker import _score
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import run
from fsl_sage.experiment.setup import make_setup
from fsl_sage.records.client_store import ClientStore
from fsl_sage.roles.work import Workbench
from fsl_sage.wire.message import Smashed

# Tensors as arrays

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@given(
    st.lists(st.integers(0, 4), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
    ),
    st.sampled_from(DTYPES),
)
@settings(deadline=None)
def test_a_tensor_comes_through_with_its_bits_and_strides(made, dtype):
    shape, order = made
    tensor = (torch.randn(shape) * 5).to(dtype).permute(order)
    back = unpack(pack(tensor))
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


def test_nothing_is_copied_on_the_way():
    tensor = torch.randn(8, 16, 4, 4).to(memory_format=torch.channels_last)
    assert unpack(pack(tensor)).data_ptr() == tensor.data_ptr()
    parameter = torch.nn.Parameter(tensor)
    assert pack(parameter)[0].ctypes.data == tensor.data_ptr()


def test_a_view_takes_only_its_own_bytes_along():
    whole = torch.arange(100.0).view(10, 10)
    for view in (whole[3:5], whole[:, 2], whole[::2, 1:4], torch.ones(1).expand(5, 4)):
        packed = pack(view)
        assert packed[0].nbytes == view.numel() * view.element_size()
        assert torch.equal(unpack(packed), view)


def test_what_is_not_aligned_like_torchs_own_memory_is_copied():
    whole = torch.randn(65)
    assert whole.data_ptr() % 64 == 0
    back = unpack(pack(whole[1:]))
    assert back.data_ptr() % 64 == 0
    assert torch.equal(back, whole[1:])


def test_nested_values_move_to_a_device():
    message = Smashed((torch.ones(2),), {"labels": torch.zeros(2)})
    value = {"a": [message, (1, torch.ones(1))], "b": {"c": torch.ones(1)}, "d": None}
    moved = to_device(value, torch.device("meta"))
    assert moved["a"][0].smashed[0].is_meta
    assert moved["a"][1][0] == 1
    assert moved["a"][1][1].is_meta
    assert moved["b"]["c"].is_meta
    assert to_device(value, torch.device("cpu"))["b"]["c"] is value["b"]["c"]


# Placement


def test_the_longest_client_first():
    sizes = [10, 40, 10, 30, 20]
    assert longest_first([0, 1, 2, 3, 4], sizes) == [1, 3, 4, 0, 2]
    assert share_out([0, 1, 2, 3, 4], sizes, 2) == {1: 0, 3: 1, 4: 1, 0: 0, 2: 0}
    assert set(share_out([0, 2], sizes, 4).values()) == {0, 1}


def test_a_run_is_laid_out_on_what_the_cluster_has(monkeypatch):
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})

    def layout(clients=10, **options):
        return lay_out(Config(**options), clients, has_s_server=True)

    assert layout().workers == 2  # one for each GPU
    assert layout(clients=1).workers == 1
    assert layout(device="cpu").workers == 8
    assert layout(device="cpu", clients=3).workers == 3
    assert layout(device="cpu", threads=3).workers == 2
    assert layout(threads=5).workers == 1  # it has no CPUs for more
    assert layout(workers=3).gpus == 1 / 2  # four actors, two on each
    assert layout(workers=4).gpus == 1 / 3  # five actors do not fit two and two
    assert layout(workers=1).gpus == 1
    assert layout(workers=4, device="cpu").gpus == 0
    assert layout(workers=4, ray_num_gpus=0.25).gpus == 0.25
    with pytest.raises(InputError, match="8 CPUs"):
        layout(workers=9)
    with pytest.raises(InputError, match="2 GPUs"):
        layout(workers=4, ray_num_gpus=1.0)


def test_without_ray_the_message_says_how_to_get_it(tiny, monkeypatch):
    for name in list(sys.modules):
        if name == "ray" or name.startswith(("ray.", "fsl_sage.engines.ray")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    config = tiny(engine="ray")
    with pytest.raises(InputError, match=r"--engine ray needs the extra 'ray': pip install .* '\.\[ray\]'"):
        run(config)
    assert not config.out.exists()


def test_an_engine_that_was_closed_leaves_alone_what_was_started_since(monkeypatch):
    """A run closes its engine when the S-server is lost, and once more where a new one cannot be started either."""
    asked = []
    monkeypatch.setattr(ray, "kill", asked.append)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("cluster"))
    engine = RayEngine.__new__(RayEngine)
    engine._own_crew, engine._own_cluster, engine._store = Crew(["worker"], "server"), True, ClientStore(0)
    engine.close()
    engine.close()
    assert asked == ["worker", "server", "cluster"]


# What the processes hold


class Reference:
    """Stands for an object of the store, here the setup itself."""

    def __init__(self, setup):
        self.setup = setup

    def hex(self):
        return str(id(self.setup))


@pytest.fixture
def stored(monkeypatch):
    """What `ray.get` gives is a new object every time, as from the store."""
    monkeypatch.setattr(actors.ray, "get", lambda reference: pickle.loads(pickle.dumps(reference.setup)))
    monkeypatch.setattr(actors.ray, "get_gpu_ids", list)
    monkeypatch.setattr(actors, "carry_tensors_as_arrays", lambda: None)
    return Reference


def kept_by(actor):
    """The parts whose modules or weights an actor still has, wherever it keeps them."""
    parts, waiting, seen = set(), [vars(actor)], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, Reference):
            continue
        seen.add(id(value))
        if isinstance(value, Workbench):
            parts |= set(value.slots)
        elif isinstance(value, Setup):
            parts |= {*value.modules, *value.initial, *(part for own in value.at_cut.values() for part in own)}
        elif isinstance(value, dict):
            waiting += value.values()
        elif type(value).__module__.startswith(("fsl_sage.engines", "fsl_sage.roles")) and hasattr(value, "__dict__"):
            waiting.append(vars(value))
    return parts


@pytest.mark.parametrize(
    ("algorithm", "held"),
    [("fsl-sage", {"client", "auxiliary"}), ("splitfed-ss", {"client"}), ("fedavg", {"client", "server"})],
)
def test_a_worker_that_trains_has_the_parts_of_a_client_alone(tiny, stored, algorithm, held):
    """The others come with a job, such as the evaluation, and go with the next round."""
    setup = make_setup(tiny(algorithm=algorithm))
    worker = actors.WorkerActor()
    worker.prepare([stored(setup)])
    assert kept_by(worker) == held
    scored = worker.call(_score, {part: setup.initial[part] for part in ("client", "server")}, 0)
    here = _score(Workbench(setup.modules), setup.settings, setup.initial, 0)
    assert all(torch.equal(torch.as_tensor(scored[name]), torch.as_tensor(here[name])) for name in here)
    assert kept_by(worker) >= {"client", "server"}
    common = (setup.initial, {}, frozenset(), None)
    if setup.algorithm.waits:
        worker.begin(0, [0], common, {}, {})
    else:
        worker.whole_round(0, 0, FakeServer(), common, {}, {})
    assert kept_by(worker) == held


class FakeServer:
    """Takes whatever it is sent."""

    def __getattr__(self, name):
        return self

    def options(self, **options):
        return self

    def remote(self, *arguments):
        return Reference(None)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, {"server", "auxiliary"}),
        ({"algorithm": "adaptsfl", "cuts": ("block1", "block2", "block3")}, {"server", "client"}),
    ],
)
def test_the_s_servers_process_has_its_own_part_and_the_auxiliary(tiny, stored, changes, held):
    """Where clients have cuts of their own it has layers of the client part too, as x_s has."""
    server = actors.ServerActor()
    setup = make_setup(tiny(**changes))
    server.prepare(setup, [stored(setup)], [])
    assert kept_by(server) == held | ({"block1", "block2", "block3"} if "cuts" in changes else set())


# What Ray says when an actor is lost

LOSSES = [
    exceptions.ActorDiedError(),
    exceptions.ActorUnavailableError("it is started again", None),
    exceptions.OutOfMemoryError("the memory monitor killed it"),
    exceptions.NodeDiedError("its machine is gone"),
    exceptions.WorkerCrashedError(),
    exceptions.ActorUnschedulableError("there is no room for it"),
]
FOR_GOOD = (exceptions.ActorDiedError, exceptions.ActorUnschedulableError)


def named(error):
    return type(error).__name__


@pytest.fixture
def answering(monkeypatch):
    """What a call of an actor gives is its own reference, and to get it is to raise it, if it is an error."""

    def get(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pool.ray, "get", get)
    monkeypatch.setattr(pool.ray, "wait", lambda references, **options: (references[:1], references[1:]))
    monkeypatch.setattr(pool, "PAUSE", 0.0)


class FakeWorker:
    """Its answers to `prepare` come from a list, the last of them for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.prepare = self

    def remote(self, setup):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.mark.usefixtures("answering")
@pytest.mark.parametrize("error", LOSSES, ids=named)
def test_what_a_lost_worker_had_begun_is_called_again(error):
    answers = [error, "done"]
    assert Pool([FakeWorker("up")], "setup").run([lambda worker: [answers.pop(0)]]) == [("done",)]
    with pytest.raises(WorkerDiedError):
        of_worker([error])


@pytest.mark.usefixtures("answering")
@pytest.mark.parametrize("error", LOSSES, ids=named)
def test_a_worker_that_is_lost_while_it_starts_is_started_again_if_ray_can(error):
    starting = Pool([FakeWorker(error, "up")], "setup")
    if isinstance(error, FOR_GOOD):
        with pytest.raises(TrainingError, match="A worker cannot be started"):
            starting.prepare()
    else:
        starting.prepare()


@pytest.mark.usefixtures("answering")
def test_a_worker_that_is_lost_whenever_it_starts_ends_the_run(monkeypatch):
    monkeypatch.setattr(pool, "PATIENCE", 0.05)
    error = exceptions.OutOfMemoryError("the memory monitor killed it")
    for wait in (Pool.prepare, lambda dying: dying.run([lambda worker: [error]])):
        with pytest.raises(TrainingError, match="No worker came back"):
            wait(Pool([FakeWorker(error)], "setup"))


@pytest.mark.usefixtures("answering")
@pytest.mark.parametrize("error", [*LOSSES, exceptions.LocalRayletDiedError()], ids=named)
def test_a_lost_s_server_is_one_for_the_driver_and_for_the_workers(tiny, error):
    engine, line = RayEngine.__new__(RayEngine), actors.Line(None, 0, 0)
    engine.setup, line._last = make_setup(tiny()), error
    with pytest.raises(LostError, match="lost"):
        engine._answer(error)
    with pytest.raises(LostError, match="lost"):
        pool.fetch(raised_by(line._wait))


def raised_by(work):
    """What a call of an actor gives that fails in this way."""
    try:
        work()
    except Exception as error:
        return exceptions.RayTaskError("work", "", error)


def test_a_worker_that_was_started_again_in_a_round_says_so_though_it_was_prepared_since(tiny, stored):
    """By the S-server's pool: of the round that the process before it had begun, nothing is here."""
    worker = actors.WorkerActor()
    worker.prepare([stored(make_setup(tiny(algorithm="splitfed-ss")))])
    for ask in (lambda: worker.advance({0: None}), lambda: worker.outcome(0)):
        with pytest.raises(UnpreparedError, match="started again"):
            ask()

"""What can be known of GPUs without one."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fsl_sage import devices
from fsl_sage.engines import process
from fsl_sage.engines.threads import number_of_workers
from fsl_sage.experiment import setup
from fsl_sage.experiment.setup import make_setup, make_site_setup
from fsl_sage.problems import make_problem
from fsl_sage.problems.images import classification

# In double precision, so that kernels of another device may sum in another order.
DOUBLE = {"precision": "float64", "workers": 1, "data": {"train_images": 60, "test_images": 20}}
RUNS = [
    {"algorithm": "fsl-sage", "codec": {"preset": "small"}, "parameter_fidelity": 1},
    {"algorithm": "fsl-sage", "model": {"auxiliary": "ridge"}, "hold": 0.1},
    {"algorithm": "splitfed-ss", "joint_step": True, "codec": {"preset": "balanced"}},
    {"algorithm": "scaffold", "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.0}, "rounds": 1},
    {"algorithm": "fedgkt", "rounds": 1},
    {"algorithm": "heron-sfl", "rounds": 1},
    {"algorithm": "locfedmix-sl", "rounds": 1},
    {"algorithm": "adaptsfl", "rounds": 1},
    {"algorithm": "fsl-sage", "clients": 4, "batch_size": 8, "clients_at_once": 3},
    {"algorithm": "fedavg", "clients": 4, "batch_size": 8, "clients_at_once": 3},
    {"algorithm": "fsl-sage", "client_memory_mib": 0, "align_every": 1},
    {"algorithm": "splitfed-ms", "client_memory_mib": 0},
]
# Sums of single precision instead of double differ in their last bits, which plain gradient descent does not amplify.
SGD = {"optimizer": {"name": "sgd", "lr": 0.01}, "rounds": 1, "workers": 1, "data": DOUBLE["data"]}
SINGLE = [
    {"algorithm": "fsl-sage", "alignment": {"optimizer": "sgd"}},
    {"algorithm": "cse-fsl", "codec": {"preset": "balanced"}},
    {"algorithm": "fedadam", "codec": {"update": "int4"}, "averaging": {"rule": "clipped"}},
    {"algorithm": "splitfed-ms", "averaging": {"rule": "median"}, "codec": {"activations": "topk:0.5"}},
]


def losses_of(tmp_path, runs, *more):
    """The final test losses of runs, there and on the CPU."""
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-m", "tests.engines.other_device", str(tmp_path / "runs.json"), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses) == len(runs)
    return losses


@pytest.mark.slow
def test_runs_on_another_device_keep_their_tensors_on_it_and_give_the_same_numbers(tmp_path):
    for there, here in losses_of(tmp_path, [{**DOUBLE, **changes} for changes in RUNS]):
        assert there == pytest.approx(here, abs=1e-9)


@pytest.mark.slow
def test_runs_need_no_double_precision_of_a_device(tmp_path):
    for there, here in losses_of(tmp_path, [{**SGD, **changes} for changes in SINGLE], "--single"):
        assert there == pytest.approx(here, abs=1e-3)


def test_what_several_names_have_as_one_tensor_stays_one_on_another_device():
    one, other = torch.ones(2), torch.zeros(3)
    there = devices.all_on({"a": one, "b": one, "c": other}, torch.device("meta"))
    assert there["a"] is there["b"]
    assert there["a"].is_meta
    assert there["c"].shape == (3,)


@pytest.mark.slow
def test_the_other_device_refuses_tensors_of_the_cpu():
    script = (
        "import torch; from tests.engines.other_device import register; library = register(); "
        "x = torch.ones(3).to('other'); print((x + x).cpu().tolist()); x + torch.ones(3)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[2.0, 2.0, 2.0]"
    assert "tensors on two devices" in done.stderr


@pytest.mark.parametrize(
    ("device", "given", "draws", "workers"),
    [
        ("cpu", None, False, 3),
        ("cuda", None, False, 1),
        ("cuda", 2, False, 2),
        ("cpu", 2, True, 1),
        ("mps", None, False, 1),
    ],
)
def test_a_gpu_trains_one_client_at_a_time_unless_more_are_asked_for(tiny, monkeypatch, device, given, draws, workers):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    settings = make_setup(tiny(workers=given)).settings
    settings = replace(settings, device=torch.device(device), draws=draws)
    assert number_of_workers(settings, clients=3) == workers


def test_images_stay_on_the_cpu_if_they_take_more_than_a_quarter_of_what_is_free_on_a_gpu(tiny, monkeypatch):
    data = make_setup(tiny()).settings.task.data
    size = data.train.x.nbytes + data.test.x.nbytes
    for free, fits in ((4 * size, True), (4 * size - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        assert classification._fits(data, torch.device("cuda")) is fits


class Pageable(torch.Tensor):
    """A tensor that notes how it is moved."""

    pinned, moves = False, ()

    def pin_memory(self):
        pinned = self.clone().as_subclass(Pageable)
        pinned.pinned = True
        return pinned

    def to(self, device, non_blocking=False):
        return self.pinned, str(device), non_blocking


@pytest.mark.parametrize(("device", "pinned"), [("cuda", True), ("mps", False), ("cpu", False)])
def test_a_gpu_fetches_batches_from_pinned_memory_without_waiting(device, pinned):
    x = torch.ones(2).as_subclass(Pageable)
    assert devices.moved(x, torch.device(device)) == (pinned, device, pinned)


@pytest.mark.cut_anew
@pytest.mark.parametrize("engine", ["local", "ray", "flower"])
def test_a_gpu_knows_how_to_compute_before_anything_runs_on_it(tiny, monkeypatch, engine):
    """Models of the user's own are tried on the device when the setup is made; cuBLAS then reads its variable."""
    told = []
    monkeypatch.setattr(process, "compute_exactly", lambda: told.append("how to compute"))
    monkeypatch.setattr(setup, "pick_device", lambda name: torch.device("cuda"))

    class ReachedError(Exception):
        pass

    def reached(*given, **more):
        told.append("a model")
        raise ReachedError

    monkeypatch.setattr(setup, "build_parts", reached)
    monkeypatch.setattr(setup, "build_held", reached)
    config = tiny(engine=engine)
    with pytest.raises(ReachedError):
        make_setup(config)
    with pytest.raises(ReachedError):
        make_site_setup(config, make_problem(config), [50, 50, 50], None, None)
    assert told == ["how to compute", "a model"] * 2


def test_a_gpu_computes_the_same_bits_each_time_and_a_cpu_is_left_alone(monkeypatch):
    called = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: called.append((on, warn_only)))
    flags = [
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_tf32"),
    ]
    before = [getattr(*flag) for flag in flags]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    threads = torch.get_num_threads()
    process.prepare_process(threads, torch.device("cpu"))
    assert called == []
    try:
        process.prepare_process(threads, torch.device("cuda"))
        assert called == [(True, True)]
        assert [getattr(*flag) for flag in flags] == [False, False, False]
    finally:
        for (place, name), value in zip(flags, before, strict=True):
            setattr(place, name, value)

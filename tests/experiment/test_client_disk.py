"""What is said of the disk before a run, against what the run then takes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsl_sage import Tracker
from fsl_sage.experiment import run
from fsl_sage.experiment.client_disk import disk_needed, state_sizes, waiting_bytes
from fsl_sage.experiment.setup import make_setup
from fsl_sage.records.client_store import ClientStore
from fsl_sage.records.resting import RestingPlace
from fsl_sage.wire.message import nbytes

STATES = {
    "an optimizer": {},
    "what coded updates have lost": {"codec": {"preset": "small"}},
    "the last activations": {"client_optimizer": "reset", "codec": {"activations": "cached-int4"}},
    "activations in float64": {"codec": {"activations": "cached-int4"}, "precision": "float64"},
    "the copy of --hold": {"hold": 0.1},
    "an auxiliary": {"algorithm": "cse-fsl", "local_auxiliary": True},
    "SCAFFOLD": {"algorithm": "scaffold", "optimizer": {"name": "sgd", "momentum": 0.0}},
    "BatchNorm statistics": {"model": {"batch_norm": "local"}},
}


@pytest.mark.parametrize("changes", STATES.values(), ids=STATES)
def test_a_state_is_as_large_as_was_said(tiny, monkeypatch, changes):
    config = tiny(clients=3, rounds=2, data={"partition": "dirichlet", "alpha": 0.5, "train_images": 60}, **changes)
    states, put = {}, ClientStore.put

    def noted(store, client, state):
        states[client] = nbytes(store._parted(state)[0])
        put(store, client, state)

    monkeypatch.setattr(ClientStore, "put", noted)
    run(config)
    assert [states[client] for client in range(3)] == state_sizes(make_setup(config))


class Watching(Tracker):
    """Adds up the files of states after each round."""

    def __init__(self):
        self.most = 0

    def start(self, config, directory, metrics):
        self.place = Path(directory) / "clients"

    def round(self, metrics):
        self.most = max(self.most, sum(path.stat().st_size for path in self.place.iterdir()))


def test_the_files_never_take_more_than_was_said(tiny):
    """A pooled auxiliary changes in every round; the headers of files are not counted."""
    config = tiny(clients=3, rounds=6, client_memory_mib=0, checkpoint_every=100)
    watching = Watching()
    run(config, [watching])
    assert disk_needed(make_setup(config)) / 3 < watching.most <= disk_needed(make_setup(config)) + 2**16


@pytest.mark.parametrize(
    ("changes", "rest"),
    [
        ({"algorithm": "splitfed-ss", "workers": 1}, True),
        ({"algorithm": "splitfed-ss", "workers": 3}, False),
        ({"algorithm": "splitfed-ss", "workers": 2, "cohort": 0.5}, False),
        ({"algorithm": "sl"}, False),
        ({"algorithm": "cpsl", "cluster_size": 1}, False),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_disk_is_asked_for_where_clients_rest_and_nowhere_else(tiny, monkeypatch, changes, rest):
    config = tiny(clients=3, rounds=1, client_memory_mib=0, client_optimizer="reset", **changes)
    rested, call = [], RestingPlace.__call__

    def noted(place, size):
        memory = call(place, size)
        rested.append(memory is not None)
        return memory

    monkeypatch.setattr(RestingPlace, "__call__", noted)
    run(config)
    assert any(rested) == rest == bool(waiting_bytes(make_setup(config)))


def test_no_disk_is_asked_for_on_a_device_whose_clients_never_rest(tiny):
    setup = make_setup(tiny(algorithm="splitfed-ss", workers=1, client_memory_mib=0, client_optimizer="reset"))
    elsewhere = replace(setup, settings=replace(setup.settings, device=torch.device("cuda")))
    assert disk_needed(setup) > disk_needed(elsewhere) == 0

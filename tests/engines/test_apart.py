"""Clients with server-side models of their own take their rounds in groups, to the same bits."""

import pytest

from fsl_sage.engines.apart import clients_together, folds_copies
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment import run
from fsl_sage.experiment.client_disk import disk_needed
from fsl_sage.experiment.setup import make_setup
from fsl_sage.records.files import load_tensors
from fsl_sage.roles.copies import Copies
from tests.test_experiment import assert_same_run

UNEQUAL = {
    "algorithm": "splitfed-ms",
    "clients": 5,
    "rounds": 3,
    "batch_size": 4,
    "data": {"partition": "dirichlet", "alpha": 0.5},
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


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_groups_change_no_bit(tiny, monkeypatch, changes):
    """Where a client may fail, no copy is folded: those runs have no groups."""
    together = tiny(**UNEQUAL, **changes, on_client_failure="drop", keep_checkpoint=True)
    run(together)
    in_groups = tiny(**UNEQUAL, **changes, client_memory_mib=0, workers=1, keep_checkpoint=True)
    most = []
    fold = Copies.fold
    monkeypatch.setattr(
        Copies, "fold", lambda copies, *given: most.append(len(copies.replicas())) or fold(copies, *given)
    )
    run(in_groups)
    assert set(most) == {1}
    assert_same_run(together.out, in_groups.out)
    assert _server_state(together.out).keys() == _server_state(in_groups.out).keys()
    assert all((x == _server_state(in_groups.out)[name]).all() for name, x in _server_state(together.out).items())


def _server_state(out):
    (path,) = out.glob("checkpoint*.safetensors")
    tensors = load_tensors(path)[0]
    state = {name: tensor for name, tensor in tensors.items() if "server/" in name}
    assert state
    return state


@pytest.mark.parametrize(("memory", "workers", "count"), [(0, 1, 1), (0, 2, 2), (1024, 1, 5)])
def test_as_many_clients_train_together_as_fit(tiny, memory, workers, count):
    setup = make_setup(tiny(**UNEQUAL, client_memory_mib=memory, workers=workers))
    engine = LocalEngine(setup)
    groups = engine._parties(range(5), folds=True)
    engine.close()
    assert max(map(len, groups)) == count == min(5, clients_together(setup, workers))
    assert [client for group in groups for client in group] == [0, 1, 2, 3, 4]
    assert disk_needed(make_setup(tiny(**UNEQUAL, client_memory_mib=0, client_optimizer="reset"))) == 0


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

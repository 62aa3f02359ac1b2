"""Local-loss SplitFed: what it is equal to."""

import pytest
import torch

from fsl_sage.errors import InputError
from fsl_sage.experiment import cost, run
from fsl_sage.records.run_directory import RunDirectory
from tests.algorithms.test_laws import assert_same, centralised, final_weights

SAME = ("test_loss", "test_accuracy", "train_loss", "auxiliary_loss", "bytes_total", "bytes_paper")


def test_with_a_shared_server_it_is_cse_fsl_with_an_upload_at_every_step_bit_for_bit(tiny):
    changes = {"cohort": 0.67, "rounds": 3, "data": {"partition": "dirichlet", "alpha": 0.5}}
    own = run(tiny(algorithm="local-loss", shared_server=True, **changes))
    cse = run(tiny(algorithm="cse-fsl", upload_every=1, **changes))
    assert [[line[name] for name in SAME] for line in own.metrics] == [
        [line[name] for name in SAME] for line in cse.metrics
    ]
    assert RunDirectory(own.directory).ledger() == RunDirectory(cse.directory).ledger()


def test_with_the_full_server_as_auxiliary_one_client_is_centralised_training(tiny):
    """The auxiliary takes the steps of the server part, and the S-server's copy takes them again."""
    config = tiny(algorithm="local-loss", clients=1, model={"auxiliary": "full"})
    assert_same(final_weights(config), centralised(config))


def test_one_client_has_one_copy(tiny):
    own, shared = (tiny(algorithm="local-loss", clients=1, shared_server=shared) for shared in (False, True))
    assert_same(final_weights(own), final_weights(shared))


def test_copies_are_not_a_shared_server(tiny):
    own, shared = (final_weights(tiny(algorithm="local-loss", shared_server=shared)) for shared in (False, True))
    assert any(not torch.equal(own[name], shared[name]) for name in own)


def test_nothing_comes_back_from_the_s_server(tiny):
    config = tiny(algorithm="local-loss")
    entries = RunDirectory(run(config).directory).ledger()
    assert {(entry.kind, entry.direction) for entry in entries if entry.round >= 0} == {
        ("activations", "up"),
        ("labels", "up"),
        *((kind, way) for kind in ("client model", "auxiliary") for way in ("up", "down")),
    }
    assert (
        sum(e.bytes for e in entries if e.round == 1)
        == cost(config, algorithms=["local-loss"])["local-loss"]["bytes_total"]
    )


def test_a_u_shape_is_refused(tiny):
    with pytest.raises(InputError, match="local-loss takes one cut"):
        run(tiny(algorithm="local-loss", model={"cut": "block1,block3"}))

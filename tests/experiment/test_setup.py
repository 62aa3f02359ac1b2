"""From a configuration to what an engine starts from."""

import pytest
import torch

from fsl_sage.errors import InputError
from fsl_sage.experiment.setup import make_dry_setup, make_setup
from fsl_sage.problems import make_problem
from fsl_sage.problems.parts import META

pytestmark = pytest.mark.cut_anew


def test_a_setup_has_what_the_configuration_says(tiny):
    setup = make_setup(tiny(clients=3, weighting="examples", local_epochs=2))
    assert set(setup.modules) == set(setup.initial) == {"client", "server", "auxiliary"}
    assert sorted(torch.cat(list(setup.examples)).tolist()) == list(range(150))
    assert list(setup.client_weights) == [50, 50, 50]
    assert setup.settings.steps == 2 * 4  # 50 images in batches of 16, the last of 2
    assert setup.settings.device == setup.settings.task.device == torch.device("cpu")


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(tiny):
    one, same, other = (make_setup(tiny(seed=seed)).initial for seed in (1, 1, 2))
    for part, tensors in one.items():
        assert all(torch.equal(x, same[part][name]) for name, x in tensors.items())
        assert not all(torch.equal(x, other[part][name]) for name, x in tensors.items())


@pytest.mark.parametrize("changes", [{}, {"model": {"batch_norm": "local"}}, {"model": {"cut": "block1,block3"}}])
def test_a_dry_setup_has_the_shapes_of_the_real_one(tiny, changes):
    config = tiny(algorithm="fedavg", **changes)
    real, dry = make_setup(config), make_dry_setup(config)
    assert [len(share) for share in dry.examples] == [len(share) for share in real.examples]
    assert dry.settings.steps == real.settings.steps
    assert dry.settings.stays_local == real.settings.stays_local
    assert dry.client_weights == real.client_weights
    for part, tensors in real.initial.items():
        shapes = dry.initial[part]
        assert {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in shapes.items()}
        assert all(x.device == META for x in shapes.values())


def test_clients_whose_data_are_elsewhere_are_known_by_their_numbers(tiny):
    config = tiny()
    setup = make_setup(config, make_problem(config), (40, 60, 50))
    assert [share.tolist() for share in setup.examples] == [list(range(count)) for count in (40, 60, 50)]
    assert list(setup.client_weights) == [40, 60, 50]
    dry = make_dry_setup(config, counts=(40, 60, 50))
    assert [len(share) for share in dry.examples] == [40, 60, 50]


def test_what_cannot_run_is_refused_before_the_data_is_read(tiny, monkeypatch):
    monkeypatch.setattr("fsl_sage.experiment.setup.make_problem", lambda config: pytest.fail("the data was read"))
    with pytest.raises(InputError, match="--device"):
        make_setup(tiny(device="cuda:99" if torch.cuda.is_available() else "cuda"))

import copy
import math

import pytest
import torch

from fsl_sage.alignment.fidelity import Fidelity, fidelity, mean

from .conftest import head, upload


def test_identical_models_are_perfect(passes):
    server = head(1).train()
    found = fidelity(copy.deepcopy(server), server, upload(6), passes)
    assert found == pytest.approx(Fidelity(1.0, 0.0))


def test_measures_what_it_says_and_changes_nothing(passes):
    auxiliary, server, batch = head(1), head(2), upload(6)
    before = copy.deepcopy([auxiliary.state_dict(), server.state_dict()])
    found = fidelity(auxiliary, server, batch, passes)
    a, s = (passes.cut_gradient(model, *batch)[0][0].flatten() for model in (auxiliary, server))
    assert found.cosine == pytest.approx(torch.cosine_similarity(a, s, dim=0).item(), abs=1e-5)
    assert found.nmse == pytest.approx(((a - s).square().sum() / s.square().sum()).item(), rel=1e-4)
    after = [auxiliary.state_dict(), server.state_dict()]
    assert all(torch.equal(x[n], y[n]) for x, y in zip(before, after, strict=True) for n in x)


def test_a_silent_auxiliary_has_cosine_zero(passes):
    silent = head(1)
    torch.nn.init.zeros_(silent[-1].weight)
    found = fidelity(silent, head(2), upload(6), passes)
    assert found.cosine == 0
    assert math.isclose(found.nmse, 1.0)


def test_mean_over_clients():
    assert mean([Fidelity(0.5, 1.0), Fidelity(1.0, 0.0)]) == Fidelity(0.75, 0.5)

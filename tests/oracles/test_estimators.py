"""Auxiliaries aligned by direction or fitted in closed form, and clients that are held, against the oracle."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from fsl_sage.alignment import matching, regression
from fsl_sage.config import from_dict
from fsl_sage.roles import client as client_role
from fsl_sage.split import Ridge
from tests.conftest import merge
from tests.oracles import ORACLES
from tests.oracles import models as m
from tests.oracles.ridge import RidgeAuxiliary
from tests.oracles.subject import compare, given_for, run_of
from tests.oracles.test_language_models import ALPHA, CHANGES, RANK
from tests.texts import save_all

DIRICHLET = {"data": {"partition": "dirichlet", "alpha": 0.5}, "cohort": 0.67, "seed": 4, "rounds": 3}
RIDGE = {"model": {"auxiliary": "ridge"}}
BY_CLIENT = {"alignment": {"scope": "client", "forgetting": 0.3, "ridge": 0.5}}
IMAGES = {
    "cosine": {"alignment": {"loss": "cosine"}},
    "cosine by client, held": {"alignment": {"loss": "cosine", "scope": "client"}, "hold": 0.3},
    "cosine, warm start": {"alignment": {"loss": "cosine"}, "warm_start": True},
    "ridge": RIDGE,
    "ridge by client": merge(RIDGE, BY_CLIENT),
    "ridge aligned at start, held": {**RIDGE, "align_at": "start", "hold": 0.3},
    "random features, held": {"model": {"auxiliary": "ridge:7"}, "hold": 0.3},
    "held": {"hold": 0.3},
}
TEXTS = {
    "cosine": {"alignment": {"loss": "cosine", "start": "previous"}},
    "ridge": RIDGE,
    "ridge by client, held": {**merge(RIDGE, BY_CLIENT), "hold": 0.3},
    "random features": {"model": {"auxiliary": "ridge:7"}},
    "held": {"hold": 0.3, "alignment": {"start": "previous"}},
    "tokens": {"alignment": {"tokens": 130, "start": "previous"}},
    "tokens by client": {"alignment": {"tokens": 130, "scope": "client", "start": "previous"}},
}


class ScaledResNet(m.ResNetAuxiliary):
    def __init__(self):
        super().__init__()
        self.register_buffer("fitted_scale", torch.ones((), dtype=torch.float64))


class ScaledGPT2(m.GPT2Auxiliary):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("fitted_scale", torch.ones((), dtype=torch.float64))


def check_images(config):
    setup, found, orders = run_of(config)
    ridge = setup.modules["auxiliary"]
    auxiliary = ScaledResNet if config.alignment.loss == "cosine" else m.ResNetAuxiliary
    if isinstance(ridge, Ridge):
        auxiliary = partial(RidgeAuxiliary, *ridge.weight.shape)
    parts = {"client": m.ResNetClient, "server": m.ResNetServer, "auxiliary": auxiliary}
    given = given_for(config, setup, orders, parts, m.image_loss, m.image_terms)
    compare(found, ORACLES["fsl-sage"](given))


@pytest.mark.parametrize("option", IMAGES)
def test_images(subject, option):
    check_images(subject(DIRICHLET, IMAGES[option]))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return save_all(tmp_path_factory.mktemp("texts"))


def check_texts(tiny, texts, change):
    config = from_dict(change, tiny(**merge(texts, CHANGES)))
    setup, found, orders = run_of(config)
    weights = load_file(f"{config.model.name.removeprefix('hf:')}/model.safetensors")
    base = {name: x.double() for name, x in weights.items()}
    makers = {"client": m.GPT2Client, "server": m.GPT2Server, "auxiliary": m.GPT2Auxiliary}
    if config.alignment.loss == "cosine":
        makers["auxiliary"] = ScaledGPT2
    parts = {part: partial(kind, base, RANK, ALPHA) for part, kind in makers.items()}
    ridge = setup.modules["auxiliary"]
    if isinstance(ridge, Ridge):
        name = "transformer.wte.weight"
        parts["auxiliary"] = partial(RidgeAuxiliary, *ridge.weight.shape, (name, base[name]))
    given = given_for(config, setup, orders, parts, m.text_loss(0.1), m.text_terms)
    compare(found, ORACLES["fsl-sage"](given))


@pytest.mark.parametrize("option", TEXTS)
def test_texts(tiny, texts, option):
    check_texts(tiny, texts, TEXTS[option])


# The faults that these comparisons are for


def forgets_nothing(monkeypatch):
    add = regression.Sums.add
    monkeypatch.setattr(regression.Sums, "add", lambda self, *given: add(self, *given[:-1], 0.0))


def counts_large_gradients_more(monkeypatch):
    add = regression.Sums.add

    def by_squares(self, ridge, z, target, gradient, forgetting):
        own = regression.Sums.nothing(ridge, gradient.device)
        add(own, ridge, z, target, gradient, 0.0)
        scale = regression.wide(ridge.gradients(ridge.rows(z, target)[1], gradient)).square().mean()
        self.features = (1 - forgetting) * self.features + scale * own.features
        self.products = (1 - forgetting) * self.products + scale * own.products

    monkeypatch.setattr(regression.Sums, "add", by_squares)


def counts_padding(monkeypatch):
    from fsl_sage.split.auxiliaries import ridge

    monkeypatch.setattr(ridge, "_reached", torch.ones_like)


def scales_by_position(monkeypatch):
    from fsl_sage.split.auxiliaries import ridge

    monkeypatch.setattr(ridge, "_unit", lambda z, dimensions: z / ridge.rms(z, (-1,)))


def holds_to_the_start(monkeypatch):
    take = client_role.Client.take_hold

    def once(self):
        if not any(name.startswith("held/") for name in self.extra):
            take(self)

    monkeypatch.setattr(client_role.Client, "take_hold", once)


def fits_no_scale(monkeypatch):
    monkeypatch.setattr(matching, "_fit_scale", lambda *given: None)


def weighs_rows_alike(monkeypatch):
    loss = matching.direction_loss

    def alike(auxiliary, batch, target, passes):
        rows = matching._rows(target, batch, passes)
        unit = torch.nn.functional.normalize(rows, dim=1).view_as(target[0])
        return loss(auxiliary, batch, (unit,), passes)

    monkeypatch.setattr(matching, "direction_loss", alike)


RIDGE_FAULTS = [forgets_nothing, scales_by_position, counts_large_gradients_more]


@pytest.mark.parametrize("fault", RIDGE_FAULTS, ids=lambda fault: fault.__name__)
def test_the_oracle_of_ridge_notices(subject, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check_images(subject(DIRICHLET, RIDGE))


def test_the_oracle_of_ridge_notices_padding(tiny, texts, monkeypatch):
    counts_padding(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check_texts(tiny, texts, RIDGE)


@pytest.mark.parametrize("fault", [fits_no_scale, weighs_rows_alike], ids=lambda fault: fault.__name__)
def test_the_oracle_of_the_cosine_notices(subject, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check_images(subject(DIRICHLET, IMAGES["cosine"]))


def test_the_oracle_of_a_hold_notices(subject, monkeypatch):
    holds_to_the_start(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check_images(subject(DIRICHLET, IMAGES["random features, held"]))

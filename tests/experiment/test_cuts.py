"""What every cut of a model costs, and which one is recommended."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fsl_sage.config import Config, DataConfig, ModelConfig, load_preset
from fsl_sage.errors import InputError
from fsl_sage.experiment import cost, run
from fsl_sage.experiment.cuts import Limits, cuts_of, recommend
from fsl_sage.models import MODELS
from fsl_sage.split import SplitError

SMALL = Config(model=ModelConfig(name="small-cnn"))


@pytest.fixture(scope="module")
def table():
    return cuts_of(SMALL)


def assert_bytes_are_those_of_the_cost(config, table):
    """Each row's bytes, and what a client sends, against the ledger of a dry run at its cut."""
    for row in table:
        here = replace(config, model=replace(config.model, cut=row.point.name))
        wanted = [*row.round_bytes, config.algorithm]
        if row.round_bytes["fsl-sage"] is None:
            with pytest.raises(SplitError, match="auxiliary"):
                cost(here, algorithms=wanted)
            continue
        expected = cost(here, algorithms=wanted)
        for algorithm, moved in row.round_bytes.items():
            assert moved == expected[algorithm]["bytes_total"], (row.point.name, algorithm)
        up = sum(ways["up"] for ways in expected[config.algorithm]["by_kind"].values())
        assert row.sent == up // config.clients


@pytest.mark.slow
@pytest.mark.parametrize("auxiliary", ["blocks:1", "linear", "full", "20%"])
def test_bytes_of_every_cut_are_those_of_the_cost_there(auxiliary):
    config = replace(SMALL, model=replace(SMALL.model, auxiliary=auxiliary))
    table = cuts_of(config)
    assert len(table) > 8
    assert_bytes_are_those_of_the_cost(config, table)


@pytest.mark.slow
def test_bytes_of_cuts_of_resnet18_are_those_of_the_cost_there():
    assert_bytes_are_those_of_the_cost(Config(), cuts_of(Config())[3::16])


@pytest.mark.slow
def test_statistics_that_stay_local_do_not_count():
    config = replace(SMALL, model=replace(SMALL.model, batch_norm="local"))
    assert_bytes_are_those_of_the_cost(config, cuts_of(config))


def vit(classes, channels):
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(
        ViTConfig(**small, image_size=32, patch_size=8, num_labels=classes, num_channels=channels)
    )


def with_frozen_start(classes, channels):
    model = vit(classes, channels)
    model.vit.embeddings.requires_grad_(False)
    model.vit.layers[0].requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("factory", [vit, with_frozen_start])
def test_bytes_of_a_transformers_cuts_are_those_of_the_cost_there(factory, monkeypatch):
    monkeypatch.setitem(MODELS, "own", factory)
    config = Config(model=ModelConfig(name="own"))
    table = cuts_of(config)
    assert {"vit.embeddings", "vit.layers.0", "vit.layers.1"} <= {row.point.name for row in table}
    assert_bytes_are_those_of_the_cost(config, table[1::4])


def test_a_model_that_cannot_be_cut_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "own", lambda classes, channels: nn.Sequential(nn.Flatten(), nn.Linear(3072, classes)))
    config = Config(model=ModelConfig(name="own"))
    with pytest.raises(InputError, match=r"own cannot be cut anywhere: its parameters are all in one module\."):
        cuts_of(config)
    monkeypatch.setitem(MODELS, "own", Scaled)
    words = r"own cannot be cut anywhere: at 'first', for instance, the parameter 'scale' is used .* scale\)\.$"
    for command in (cuts_of, run):
        with pytest.raises(InputError, match=words):
            command(replace(config, out=tmp_path / "run", data=FEW))


FEW = DataConfig(train_images=40, test_images=20)


class Scaled(nn.Module):
    """The same weight scales the inputs and the outputs."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU()), nn.Linear(8, classes)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * self.scale)) * self.scale


def test_facts_of_resnet18_at_the_papers_cut():
    (row,) = [row for row in cuts_of(load_preset("paper")) if row.point.name == "layer2"]
    assert row.point.client_parameters == 683_072
    assert row.point.client_bytes == 2_740_048
    assert row.point.server_bytes == 42_025_080
    assert row.point.activation_bytes == 8192
    labels = 10 * 4 * 256 * 8
    assert row.round_bytes["cse-fsl"] == 307_075_200 + labels


def test_limits_mark_what_fits_and_the_recommendation_says_why(table):
    free = recommend(table, Limits(), "fsl-sage")
    assert "Recommended: block3.conv" in free
    memory = sorted(row.client.memory for row in table if row.client)[3]
    limited = Limits(client_memory=memory)
    fitting = [row for row in table if not row.obstacles(limited)]
    assert {row.client.memory <= memory for row in fitting} == {True}
    assert "do not" in recommend(table, limited, "fsl-sage")
    nothing = recommend(table, Limits(client_memory=1, client_flops=1), "fsl-sage")
    assert nothing.startswith("No cut fits")
    assert table[0].obstacles(Limits(uplink=1)) == ["uplink"]


@pytest.mark.parametrize(
    "changes", [{"client_optimizer": "average"}, {"codec": {"preset": "balanced"}}], ids=["optimizers", "codecs"]
)
def test_bytes_that_are_not_in_proportion_are_those_of_a_round_there(tiny, changes):
    config = tiny(algorithm="splitfed-ss", **changes)
    for row in cuts_of(config)[2:7:2]:
        there = replace(config, model=replace(config.model, cut=row.point.name))
        assert row.round_bytes == {"splitfed-ss": cost(there, algorithms=["splitfed-ss"])["splitfed-ss"]["bytes_total"]}

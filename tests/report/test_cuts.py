import json
from dataclasses import replace

import pytest

from fsl_sage.config import Config, ModelConfig, load_preset
from fsl_sage.errors import InputError
from fsl_sage.experiment import cost
from fsl_sage.report.cuts import Limits, as_json, cuts_figure, parse_amount, recommend, rows

SMALL = Config(model=ModelConfig(name="small-cnn"))


@pytest.fixture(scope="module")
def table():
    return rows(SMALL)


@pytest.mark.parametrize("cut", ["block1", "block2"])
def test_a_rounds_bytes_are_those_of_the_cost_at_that_cut(table, cut):
    expected = cost(replace(SMALL, model=replace(SMALL.model, cut=cut)))
    (row,) = [row for row in table if row.point.name == cut]
    for algorithm, moved in row.round_bytes.items():
        assert moved == expected[algorithm]["bytes_total"], algorithm


def test_facts_of_resnet18_at_the_papers_cut():
    (row,) = [row for row in rows(load_preset("paper")) if row.point.name == "layer2"]
    assert row.point.client_parameters == 683_072
    assert row.point.client_bytes == 2_740_048
    assert row.point.server_bytes == 42_025_080
    assert row.point.activation_bytes == 8192
    labels = 10 * 4 * 256 * 8
    assert row.round_bytes["cse-fsl"] == 307_075_200 + labels


def test_limits_mark_what_fits_and_the_recommendation_says_why(table):
    free = recommend(table, Limits(), "fsl-sage")
    assert "Recommended: block3.conv" in free
    memory = sorted(row.point.client_memory for row in table)[3]
    limited = Limits(client_memory=memory)
    fitting = [row for row in table if not row.obstacles(limited)]
    assert {row.point.client_memory <= memory for row in fitting} == {True}
    assert "do not" in recommend(table, limited, "fsl-sage")
    nothing = recommend(table, Limits(client_memory=1, client_flops=1), "fsl-sage")
    assert nothing.startswith("No cut fits")
    assert table[0].obstacles(Limits(uplink=1)) == ["uplink"]


def test_as_plain_data_and_as_a_figure(table, tmp_path):
    assert len(json.loads(json.dumps(as_json(table, Limits(), "fsl-sage")))["cuts"]) == len(table)
    cuts_figure(tmp_path / "cuts.png", SMALL, table)
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")


def test_amounts():
    assert parse_amount("500MB", "--uplink") == 500e6
    assert parse_amount("2 GiB", "--uplink") == 2 * 2**30
    assert parse_amount("8e9", "--client-flops") == 8e9
    assert parse_amount("3GFLOPs", "--client-flops") == 3e9
    for text in ("much", "-1MB", "0", ""):
        with pytest.raises(InputError, match="--uplink"):
            parse_amount(text, "--uplink")

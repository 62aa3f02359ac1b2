import dataclasses
import math
from dataclasses import replace

import pytest

from fsl_sage.algorithms import resolve
from fsl_sage.config import (
    Config,
    DataConfig,
    LoRAConfig,
    OptimizerConfig,
    default_config,
    digest,
    from_dict,
    load_preset,
    to_dict,
)
from fsl_sage.errors import InputError


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--rounds -1", {"rounds": -1}),
        ("--rounds 0", {"rounds": 0}),
        ("--clients 0", {"clients": 0}),
        ("--batch-size 1", {"batch_size": 1}),
        ("--cohort 1.5", {"cohort": 1.5}),
        ("--cohort 0", {"cohort": 0.0}),
        ("--target-accuracy -1", {"target_accuracy": -1.0}),
        ("--budget-gib 0", {"budget_gib": 0.0}),
        ("--data.alpha 0 ", {"data": DataConfig(alpha=0.0)}),
        ("--data.alpha nan", {"data": DataConfig(alpha=math.nan)}),
        ("--data.alpha 1e+06", {"data": DataConfig(alpha=1e6)}),
        ("--data.test-fraction 1", {"data": DataConfig(test_fraction=1.0)}),
    ],
)
def test_impossible_values_are_refused_with_option_and_value(option, changes):
    with pytest.raises(InputError) as error:
        Config(**changes)
    assert option in str(error.value)


def test_a_configuration_goes_through_plain_values():
    config = Config(rounds=3, data=DataConfig(alpha=0.5), track=("tensorboard",))
    assert from_dict(to_dict(config)) == config


def test_every_field_has_a_help_text():
    import ast
    from pathlib import Path

    import fsl_sage.config.fields

    tree = ast.parse(Path(fsl_sage.config.fields.__file__).read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                nested = isinstance(field, ast.AnnAssign) and ast.unparse(field.annotation).endswith("Config")
                if isinstance(field, ast.AnnAssign) and not nested:
                    assert isinstance(after, ast.Expr), f"{node.name}.{ast.unparse(field.target)}"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("rouns = 3", "'rouns' is not an option"),
        ("[data]\nnam = 'x'", "'data.nam' is not an option"),
        ("rounds = 'three'", "--rounds 'three' is not possible: give a whole number"),
        ("rounds = true", "--rounds True is not possible"),
        ("order = 'random'", "give interleaved, blocked or arrival"),
        ("data = 3", "write it as a table [data]"),
        ("rounds = ", "cannot be read as TOML"),
    ],
)
def test_a_bad_preset_is_refused_with_its_name(tmp_path, toml, message):
    file = tmp_path / "bad.toml"
    file.write_text(toml)
    with pytest.raises(InputError) as error:
        resolve(load_preset(file))
    assert message in str(error.value)
    assert "bad.toml" in str(error.value)


def test_presets_by_name_and_file(tmp_path):
    assert load_preset("paper").batch_size == 256
    with pytest.raises(InputError, match=r"no preset 'papr'; there are: .*paper"):
        load_preset("papr")
    with pytest.raises(InputError, match="There is no file"):
        load_preset(tmp_path / "none.toml")
    file = tmp_path / "mine.toml"
    file.write_text("batch_size = 8\n[data]\nname = 'cifar10'\n")
    config = load_preset(file)
    assert (config.batch_size, config.data.name, config.rounds) == (8, "cifar10", Config().rounds)


def test_texts_have_the_defaults_of_the_lora_paper(tmp_path):
    texts = default_config("e2e")
    assert (texts.data.name, texts.batch_size, texts.data.sequence_length) == ("e2e", 8, 512)
    assert texts.optimizer == OptimizerConfig(
        name="adamw", lr=2e-4, weight_decay=0.01, schedule="linear", warmup=0.02, decay=0
    )
    assert texts.lora == LoRAConfig(rank=4, alpha=32, dropout=0.1, targets=())
    assert default_config() == default_config("cifar10") == Config()
    assert from_dict({"data": {"name": "e2e"}, "optimizer": {"lr": 1e-3}}) == replace(
        texts, optimizer=replace(texts.optimizer, lr=1e-3)
    )
    preset = tmp_path / "texts.toml"
    preset.write_text('batch_size = 4\n[data]\nname = "e2e"\n')
    assert load_preset(preset) == replace(texts, batch_size=4)


def test_the_digest_tells_what_decides_the_numbers():
    config = Config()
    assert digest(config) == digest(dataclasses.replace(config, workers=7, checkpoint_every=5))
    assert digest(config) != digest(dataclasses.replace(config, seed=7))
    assert digest(config) != digest(dataclasses.replace(config, threads=2))


def test_an_option_that_a_later_version_adds_does_not_make_it_another_run(monkeypatch):
    config = Config(rounds=3, data=DataConfig(partition="dirichlet"))
    after = digest(config)
    added = ("lora", "cohort")
    monkeypatch.setattr(
        "fsl_sage.config.plain.to_dict", lambda one: {key: x for key, x in to_dict(one).items() if key not in added}
    )
    assert digest(config) == after

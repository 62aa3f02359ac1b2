import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fsl_sage.algorithms import find_algorithm, resolve
from fsl_sage.cli.front import obey
from fsl_sage.config import (
    Config,
    DataConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    default_config,
    digest,
    from_dict,
    load_preset,
    to_dict,
)
from fsl_sage.errors import InputError
from fsl_sage.models import check_model_name
from fsl_sage.problems.images.sources import load_images


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
    with pytest.raises(InputError, match="no preset 'papr': did you mean paper"):
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


@pytest.mark.parametrize(
    ("made", "field", "value"),
    [
        (lambda: Config(out="runs/x"), "out", Path("runs/x")),
        (lambda: Config(rounds="2"), "rounds", 2),
        (lambda: Config(rounds=np.int64(2)), "rounds", 2),
        (lambda: Config(rounds=2.0), "rounds", 2),
        (lambda: Config(cohort="0.5"), "cohort", 0.5),
        (lambda: Config(cohort=np.float32(0.5)), "cohort", 0.5),
        (lambda: Config(budget_gib=1), "budget_gib", 1.0),
        (lambda: Config(track=["mlflow"]), "track", ("mlflow",)),
        (lambda: Config(model={"cut": ["a"]}), "model", ModelConfig(cut="a")),
        (lambda: ModelConfig(cut=("a", "b")), "cut", "a,b"),
        (lambda: DataConfig(dir="data"), "dir", Path("data")),
        (lambda: LoRAConfig(targets=["q", "v"]), "targets", ("q", "v")),
    ],
)
def test_what_is_meant_is_understood(made, field, value):
    found = getattr(made(), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Config(rounds="two"), "--rounds 'two' is not possible: give a whole number"),
        (lambda: Config(rounds=2.5), "--rounds 2.5"),
        (lambda: Config(rounds=None), "--rounds None"),
        (lambda: Config(keep_checkpoint="yes"), "--keep-checkpoint 'yes'"),
        (lambda: Config(engine="rya"), "--engine 'rya'"),
        (lambda: ModelConfig(cut=["a", 1]), "--model.cut"),
        (lambda: DataConfig(partition=3), "--data.partition 3"),
        (lambda: Config(data="cifar10"), "data is a group of options: give a DataConfig"),
        (lambda: Config(data={"nam": "cifar10"}), "'data.nam' is not an option: did you mean name?"),
        (lambda: Config(model=DataConfig()), "model is a group of options"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_fields_name(made, said):
    with pytest.raises(InputError) as error:
        made()
    assert said in str(error.value)


def test_a_number_that_was_given_as_another_type_is_the_same_run():
    assert digest(Config(optimizer=OptimizerConfig(lr=1))) == digest(Config(optimizer=OptimizerConfig(lr=1.0)))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (lambda: from_dict({"clents": 3, "algorithm": "fedavg"}), "clients"),
        (lambda: from_dict({"data": {"alhpa": 3}}), "alpha"),
        (lambda: find_algorithm("fsl-sge"), "fsl-sage"),
        (lambda: load_preset("papr"), "paper"),
        (lambda: load_images("cifra10"), "cifar10"),
        (lambda: check_model_name("resnet-18"), "resnet18"),
        (lambda: obey(["evalute"]), "evaluate"),
    ],
)
def test_a_typing_error_is_answered_with_the_nearest_name(given, meant, capsys):
    with pytest.raises((InputError, SystemExit)) as error:
        resolve(given())
    assert f"did you mean {meant}?" in str(error.value) + capsys.readouterr().err


def test_what_is_like_nothing_is_answered_with_all_names():
    with pytest.raises(InputError, match=r"; there are: fsl-sage, .*MODULE:CLASS"):
        find_algorithm("xyz")

"""A run directory that somebody else has made: it is used, or refused in a sentence, and its code never runs."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

from fsl_sage import InputError, load_model, run
from fsl_sage.cli import main
from fsl_sage.inference import predict
from fsl_sage.records.files import load_tensors
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    data = {"train_images": 60, "test_images": 20}
    run(tiny_config({"out": str(out), "rounds": 1, "algorithm": "fedavg", "workers": 1, "data": data}))
    Image.new("RGB", (32, 32)).save(out.parent / "x.png")
    return out


@pytest.fixture
def hostile(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def change(file: Path, **values) -> None:
    """Other values in a JSON file; those that are None go."""
    changed = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


@pytest.mark.parametrize(
    "values",
    [
        {"mean": 3},
        {"std": None},
        {"image": None},
        {"classes": None},
        {"mean": ["a", "b", "c"]},
        {"mean": [0.5]},
        {"std": [0, 0, 0]},
        {"std": [float("nan")] * 3},
        {"image": [3, 32]},
        {"image": [3, -1, 32]},
        {"image": [3, 10**9, 10**9]},
        {"image": [3.0, 32.0, 32.0]},
        {"image": "abc"},
        {"classes": [["a"]] * 10},
        {"classes": []},
    ],
    ids=str,
)
def test_what_is_said_of_the_images_is_looked_at(whole, hostile, values):
    change(hostile / "inference.json", **values, sha256=None)
    with pytest.raises(InputError, match=r"inference\.json"):
        predict(hostile, [whole.parent / "x.png"])


def test_one_number_changed_in_what_is_said_of_the_images(whole, hostile):
    """Another mean gives other classes, and nothing else would tell."""
    change(hostile / "inference.json", mean=[0.4914, 0.4822, 0.9465])
    with pytest.raises(InputError, match=r"inference\.json is damaged"):
        predict(hostile, [whole.parent / "x.png"])


@pytest.mark.parametrize("metadata", ['{"same": "{\\"a\\": []}"}', "[1]", "5", '{"values": 7}', '{"same": "5"}'])
def test_weights_whose_header_is_not_as_it_should_be(hostile, metadata):
    header = b'{"__metadata__":' + metadata.encode() + b',"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    (hostile / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match=r"cannot be read|do not fit"):
        load_model(hostile)


def test_a_model_that_gives_no_numbers(whole, hostile, capsys):
    weights, _ = load_tensors(hostile / "model.safetensors")
    spoilt = {name: x * float("nan") if x.is_floating_point() else x for name, x in weights.items()}
    (hostile / "model.safetensors").write_bytes(safetensors.torch.save(spoilt))
    assert all(parameter.isnan().all() for parameter in load_model(hostile).parameters())
    with pytest.raises(SystemExit):
        main(["predict", str(hostile), str(whole.parent / "x.png"), "--json"])
    assert "gives no numbers" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["os:abort", "subprocess:Popen", "evil:make", "evil.deeper:make"])
def test_code_that_a_run_directory_names(hostile, monkeypatch, name):
    """Neither is Python's own called, nor what the directory has brought along, also where it is the current one."""
    config = json.loads((hostile / "config.json").read_text())
    config["config"]["model"]["name"] = name
    (hostile / "config.json").write_text(json.dumps(config))
    (hostile / ("evil" if "deeper" in name else ".")).mkdir(exist_ok=True)
    for place in ("evil/__init__.py",) if "deeper" in name else ("evil.py",):
        (hostile / place).write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.chdir(hostile)
    with pytest.raises(InputError, match=r"is a part of Python|lies in a run directory"):
        load_model(".")
    assert not (hostile / "ran").exists()


def test_names_do_not_command_the_terminal(whole, hostile, tmp_path, capsys):
    change(hostile / "inference.json", sha256=None, classes=[f"\x1b[31m{label}\n" for label in range(10)])
    image = tmp_path / "a\x1b]0;title\x07\nb.png"
    shutil.copy(whole.parent / "x.png", image)
    main(["predict", str(hostile), str(image)])
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert not set("\x1b\x07") & set(said)
    with pytest.raises(SystemExit):
        main(["predict", str(hostile), str(tmp_path / "gone\x1b[2J.png")])
    assert "\x1b[2J" not in capsys.readouterr().err


@pytest.mark.parametrize("top", [0, -1])
def test_at_least_one_class_is_named(whole, top):
    with pytest.raises(InputError, match="--top"):
        predict(whole, [whole.parent / "x.png"], top=top)


def test_the_model_is_used_where_all_is_as_it_should_be(whole):
    assert len(predict(whole, [whole.parent / "x.png"], top=3)[0].classes) == 3
    assert isinstance(load_model(whole), torch.nn.Module)

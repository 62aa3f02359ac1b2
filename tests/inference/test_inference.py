"""A run directory holds all that its model needs to be used."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fsl_sage import Config, InputError, Tracker, evaluate, load_model, resume, run
from fsl_sage.cli import main
from fsl_sage.inference import load_trained, predict
from fsl_sage.inference.pictures import read_picture
from fsl_sage.problems.images.images import ImageData
from fsl_sage.problems.images.pictures import upright_pixels
from fsl_sage.problems.images.sources import load_images
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from tests.conftest import tiny_config
from tests.experiment.test_own_problem import Housing


@pytest.fixture(scope="module")
def own_images(tmp_path_factory) -> Path:
    """Images whose mean and standard deviation are nobody's usual ones, as a user brings them."""
    source = load_images("cifar10-mini", train_images=120, test_images=40)
    dark = [(images.x // 4).numpy() for images in (source.train, source.test)]
    path = tmp_path_factory.mktemp("own") / "dark.npz"
    names = np.array(source.classes)
    np.savez(path, x=dark[0], y=source.train.y.numpy(), x_test=dark[1], y_test=source.test.y.numpy(), classes=names)
    return path


@pytest.fixture(scope="module")
def trained(own_images, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    data = {"name": f"npz:{own_images}", "train_images": None, "test_images": None}
    run(tiny_config({"out": str(out), "rounds": 3, "keep": "best", "data": data}))
    own_images.rename(own_images.with_name("gone.npz"))  # whatever is needed now is in the run directory
    yield out
    own_images.with_name("gone.npz").rename(own_images)


def data_of(own_images: Path) -> ImageData:
    return load_images(f"npz:{own_images.with_name('gone.npz')}")


def test_the_loaded_model_predicts_what_the_run_tested(trained: Path, own_images: Path, tmp_path: Path) -> None:
    test = data_of(own_images).test
    for number, image in enumerate(test.x):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number:03}.png")
    names = load_trained(trained).terms.classes
    right = [
        found.classes[0] == names[int(label)] for found, label in zip(predict(trained, [tmp_path]), test.y, strict=True)
    ]
    assert sum(right) / len(right) == RunDirectory(trained).metrics()[-1]["test_accuracy"]


def test_its_own_test_set_gives_the_last_rounds_metrics(trained: Path, own_images: Path) -> None:
    gone = own_images.with_name("gone.npz")
    gone.rename(own_images)
    try:
        metrics = evaluate(trained)
    finally:
        own_images.rename(gone)
    last = RunDirectory(trained).metrics()[-1]
    assert metrics == {name: last[name] for name in metrics}


def test_another_set_is_seen_as_the_runs_own(trained: Path, own_images: Path) -> None:
    moved = own_images.with_name("gone.npz")
    last = RunDirectory(trained).metrics()[-1]
    metrics = evaluate(trained, f"npz:{moved}")
    assert metrics == {name: last[name] for name in metrics}


def test_all_images_of_an_archive_without_test_images_are_used(trained: Path, own_images: Path, tmp_path: Path) -> None:
    test = data_of(own_images).test
    np.savez(tmp_path / "more.npz", x=test.x.numpy(), y=test.y.numpy())
    last = RunDirectory(trained).metrics()[-1]
    assert evaluate(trained, f"npz:{tmp_path / 'more.npz'}")["test_accuracy"] == last["test_accuracy"]


def test_all_pictures_of_a_folder_without_a_test_set_are_used(trained: Path, own_images: Path, tmp_path: Path) -> None:
    """A fifth of them was, silently; and pictures of other sizes were refused."""
    test = data_of(own_images).test
    names = load_trained(trained).terms.classes
    for number, (image, label) in enumerate(zip(test.x, test.y, strict=True)):
        (tmp_path / names[int(label)]).mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / names[int(label)] / f"{number:03}.png")
    score = evaluate(trained, f"folder:{tmp_path}")["test_accuracy"]
    assert score == RunDirectory(trained).metrics()[-1]["test_accuracy"]
    larger = tmp_path / names[0] / "larger.png"
    Image.new("RGB", (70, 50)).save(larger)
    assert 0 <= evaluate(trained, f"folder:{tmp_path}")["test_accuracy"] <= 1
    larger.unlink()
    (tmp_path / "stranger").mkdir()
    with pytest.raises(InputError, match=r"stranger is no class of the run; its classes are airplane, "):
        evaluate(trained, f"folder:{tmp_path}")


@pytest.mark.parametrize("data", ["jsonl:texts.jsonl", "imdb"])
def test_texts_are_no_images(trained: Path, data: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "a", "label": "b"}\n')
    with pytest.raises(InputError, match=f"The run has learnt from images, and {data} is something else"):
        evaluate(trained, data)


def test_classes_in_another_order_are_refused(trained: Path, own_images: Path, tmp_path: Path) -> None:
    data = data_of(own_images)
    np.savez(tmp_path / "o.npz", x=data.test.x.numpy(), y=data.test.y.numpy(), classes=np.array(data.classes[::-1]))
    with pytest.raises(InputError, match="another order"):
        evaluate(trained, f"npz:{tmp_path / 'o.npz'}")


def test_the_best_model_is_kept_beside_the_last(trained: Path, own_images: Path) -> None:
    metrics = RunDirectory(trained).metrics()
    best = max(metrics, key=lambda line: line["test_accuracy"])
    weights, values = load_tensors(trained / "best.safetensors")
    assert values == {"round": best["round"]}
    found = evaluate(trained, f"npz:{own_images.with_name('gone.npz')}", best=True)
    assert found == {name: best[name] for name in found}
    assert set(weights) == set(load_tensors(trained / "model.safetensors")[0])


def test_keeping_the_best_survives_a_kill(tiny, tmp_path: Path) -> None:
    whole = tiny(rounds=4, keep="best", checkpoint_every=3)
    run(whole)

    class KillError(Exception):
        pass

    class Killer(Tracker):
        def round(self, metrics):
            if metrics["round"] == 1:
                raise KillError

    cut = tiny(rounds=4, keep="best", checkpoint_every=3)
    with pytest.raises(KillError):
        run(cut, [Killer()])
    resume(cut.out)
    assert (whole.out / "best.safetensors").read_bytes() == (cut.out / "best.safetensors").read_bytes()


def test_a_run_does_not_go_on_without_its_best_model(tiny) -> None:
    """A later round brings it back only if that is better; what using the model takes is known, and written anew."""

    class Halt(Tracker):
        def round(self, metrics: dict) -> None:
            raise KeyboardInterrupt

    config = tiny(rounds=2, keep="best", algorithm="fedavg", data={"train_images": 60, "test_images": 20})
    with pytest.raises(KeyboardInterrupt):
        run(config, [Halt()])
    best, inference = config.out / "best.safetensors", config.out / "inference.json"
    whole, said = best.read_bytes(), inference.read_bytes()
    best.unlink()
    with pytest.raises(InputError, match=r"best\.safetensors is gone"):
        resume(config.out)
    best.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=r"best\.safetensors is damaged"):
        resume(config.out)
    best.write_bytes(whole)
    inference.write_bytes(said.replace(b"0.4914", b"0.9914"))
    resume(config.out)
    assert inference.read_bytes() == said


def test_a_run_that_keeps_the_last_model_alone_has_no_best(tiny) -> None:
    config = tiny(rounds=1)
    run(config)
    assert not (config.out / "best.safetensors").exists()
    with pytest.raises(InputError, match="--keep best"):
        load_model(config.out, best=True)


def test_a_best_model_of_another_round_than_the_result_says_is_refused(trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / "run"))
    result = json.loads((copy / "result.json").read_text())
    other = result["best_round"] + 1
    (copy / "result.json").write_text(json.dumps({**result, "best_round": other}))
    with pytest.raises(InputError, match=rf"best\.safetensors is not the model of round {other}, which .*result\.json"):
        load_model(copy, best=True)
    load_model(copy)
    (copy / "result.json").unlink()  # a run in the middle has a best model so far
    load_model(copy, best=True)


def test_the_card_loads_the_model(trained: Path, own_images: Path) -> None:
    card = (trained / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace('"DIR"', repr(str(trained)))
    space: dict = {}
    exec(code, space)
    inference = json.loads((trained / "inference.json").read_text())
    mean, std = (torch.tensor(inference[name]).view(-1, 1, 1) for name in ("mean", "std"))
    test = data_of(own_images).test
    with torch.no_grad():
        logits = space["model"]((test.x / 255 - mean) / std)
    right = float((logits.argmax(1) == test.y).float().mean())
    assert right == pytest.approx(RunDirectory(trained).metrics()[-1]["test_accuracy"])
    assert all(name in card for name in inference["classes"])


def test_the_commands_say_the_same(trained: Path, own_images: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "large.png"
    Image.new("L", (100, 80), 12).save(file)
    main(["predict", str(trained), str(file), "--top", "3", "--json"])
    said = json.loads(capsys.readouterr().out)
    (found,) = predict(trained, [file], top=3)
    assert list(said["classes"]) == list(found.classes)
    main(["evaluate", str(trained), "--data", f"npz:{own_images.with_name('gone.npz')}", "--json"])
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["test_accuracy"] == RunDirectory(trained).metrics()[-1]["test_accuracy"]


@pytest.mark.parametrize(("content", "said"), [(None, "no file"), (b"no image", "not an image")])
def test_files_that_are_no_images_are_named(trained: Path, tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "x.png"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=said) as refused:
        predict(trained, [file])
    assert str(file) in str(refused.value)


def test_a_run_that_is_not_finished_says_so(tiny) -> None:
    config = tiny()
    RunDirectory.create(config)
    with pytest.raises(InputError, match="not finished"):
        load_model(config.out)


def test_a_problem_of_ones_own_is_given_again(tmp_path: Path) -> None:
    config = Config(rounds=1, clients=2, batch_size=8, out=tmp_path / "run", device="cpu")
    result = run(config, problem=Housing())
    metrics = evaluate(config.out, problem=Housing())
    assert metrics == {"test_error": result.metrics[-1]["test_error"]}
    with pytest.raises(InputError, match="not on images"):
        predict(load_trained(config.out, problem=Housing()), ["x.png"])


class Tied(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8)), nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(self.first(x)).relu()))


def tied(classes: int, channels: int) -> nn.Module:
    return Tied(classes)


def tied_norm(classes: int, channels: int) -> nn.Module:
    model, norm = Tied(classes), nn.BatchNorm1d(8)
    model.a, model.b = nn.Sequential(nn.Linear(8, 8), norm), nn.Sequential(nn.Linear(8, 8), norm)
    return model


@pytest.mark.parametrize(("factory", "name"), [("tied", "weight"), ("tied_norm", "1.running_mean")])
def test_a_model_with_tied_weights_or_buffers_is_loaded(tiny, factory, name) -> None:
    model = {"name": f"tests.inference.test_inference:{factory}", "cut": "first", "auxiliary": "linear"}
    result = run(tiny(algorithm="splitfed-ss", rounds=1, model=model))
    loaded = load_model(result.directory)
    one, other = (part.state_dict(keep_vars=True)[name] for part in (loaded.a, loaded.b))
    assert one is other
    found = evaluate(result.directory)
    assert found["test_loss"] == result.metrics[-1]["test_loss"]


def test_a_kill_between_the_checkpoint_and_the_best_model_loses_neither(tiny, monkeypatch) -> None:
    class KillError(BaseException):
        pass

    def killed(self: RunDirectory, rounds: int) -> None:
        raise KillError

    whole, cut = (tiny(rounds=2, keep="best", data={"train_images": 60, "test_images": 20}) for _ in range(2))
    run(whole)
    with monkeypatch.context() as during:
        during.setattr(RunDirectory, "settle_best", killed)
        with pytest.raises(KillError):
            run(cut)
    assert not (cut.out / "best.safetensors").exists()
    resume(cut.out)
    assert (whole.out / "best.safetensors").read_bytes() == (cut.out / "best.safetensors").read_bytes()


def test_a_run_in_double_precision_is_evaluated_in_it(tiny) -> None:
    result = run(tiny(precision="float64", rounds=1))
    assert next(load_model(result.directory).parameters()).dtype == torch.float64
    assert evaluate(result.directory)["test_loss"] == result.metrics[-1]["test_loss"]


def test_a_picture_is_scaled_as_in_training(trained: Path, own_images: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    terms = load_trained(trained).terms
    assert terms is not None
    _, height, width = terms.image
    with Image.open(tmp_path / "a.png") as picture:
        seen = upright_pixels(picture, "RGB", (width, height))
    assert np.array_equal(read_picture(tmp_path / "a.png", terms).numpy().transpose(1, 2, 0), seen)


def test_a_run_without_a_merged_model_says_so(tiny) -> None:
    result = run(tiny(algorithm="fedgkt", rounds=1))
    with pytest.raises(InputError, match="has no model of its own: with fedgkt each client keeps its part"):
        load_model(result.directory)

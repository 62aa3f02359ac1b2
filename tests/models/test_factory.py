import pytest
import torch
from torch import nn

from fsl_sage.errors import InputError
from fsl_sage.experiment import run
from fsl_sage.models.factory import MODELS, make_model


class Own(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(72, classes))

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def no_module(classes):
    return classes


def test_ones_own_model_trains(tiny):
    result = run(tiny(rounds=1, model={"name": "tests.models.test_factory:Own", "cut": "first"}))
    assert result.metrics[0]["aligned"]


def test_a_cut_is_asked_for_with_the_names_that_work(tiny):
    with pytest.raises(InputError, match=r"give --model.cut, such as first"):
        run(tiny(model={"name": "tests.models.test_factory:Own"}))
    with pytest.raises(InputError, match="first"):
        run(tiny(model={"name": "tests.models.test_factory:Own", "cut": "nowhere"}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet19", r"did you mean resnet18\?"),
        ("no.such.module:x", "cannot be imported"),
        ("tests.models.test_factory:none", "is not there: tests.models.test_factory has no none"),
        ("tests.models.test_factory:no_modul", r"did you mean no_module\?"),
        ("tests.models.test_factory:no_module", "must give a torch.nn.Module"),
        ("hf:resnetx", "neither an architecture nor a directory"),
        ("hf:llama", "image classification"),
    ],
)
def test_bad_names(name, words):
    with pytest.raises(InputError, match=words):
        make_model(name, 10, (3, 32, 32))


def test_hugging_face_by_architecture_and_directory(tiny, tmp_path):
    from transformers import ViTConfig

    with torch.device("meta"):
        whole = make_model("hf:resnet", 7, (1, 32, 32))
    assert whole(torch.empty(2, 1, 32, 32, device="meta")).logits.shape == (2, 7)
    ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, patch_size=8
    ).save_pretrained(tmp_path)
    model = {"name": f"hf:{tmp_path}", "cut": "vit.layers.0"}
    with pytest.raises(InputError) as error:
        run(tiny(rounds=1, model={**model, "cut": "nowhere"}))
    blocks = [word.strip("' ,.;") for word in str(error.value).split() if word.strip("' ,.;").endswith(".0")]
    result = run(tiny(rounds=1, model={**model, "cut": blocks[0]}))
    assert result.metrics[0]["aligned"]
    assert result.metrics[0]["fidelity_cosine"] is not None


def test_an_image_model_with_weights_can_be_costed(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path)
    with torch.device("meta"):
        assert all(weight.is_meta for weight in make_model(f"hf:{tmp_path}", 10, (3, 32, 32)).parameters())


def test_a_registered_factory_is_called_by_name_like_one_that_is_imported(monkeypatch):
    """It was called by position: classes and channels were swapped, and one parameter was one too few."""

    def swapped(channels, classes):
        return nn.Linear(channels, classes)

    for factory in (swapped, lambda classes, **more: nn.Linear(3, classes), lambda: nn.Linear(3, 7)):
        monkeypatch.setitem(MODELS, "own", factory)
        model = make_model("own", 7, (3, 32, 32))
        assert (model.in_features, model.out_features) == (3, 7)
    monkeypatch.setitem(MODELS, "own", lambda n: nn.Linear(3, n))
    with pytest.raises(InputError, match=r"--model\.name own needs 'n': a factory is given classes and channels"):
        make_model("own", 7, (3, 32, 32))

"""Directories of the package `datasets`; skipped where it is not installed."""

import numpy as np
import pytest
import torch
from tests.problems.texts.test_labelled import save_bert

from fsl_sage.config import from_dict
from fsl_sage.errors import InputError
from fsl_sage.problems import make_dry_problem, make_problem
from fsl_sage.problems.images.sources import load_images
from fsl_sage.problems.saved import open_saved
from fsl_sage.problems.texts.rows import label_names, read_saved


@pytest.fixture
def hf():
    return pytest.importorskip("datasets")


def images(hf, labels, size=(9, 8)):
    from PIL import Image

    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["cat", "dog"])})
    pictures = [Image.fromarray(np.full((size[1], size[0], 3), 20 * label + 7, np.uint8)) for label in labels]
    return hf.Dataset.from_dict({"image": pictures, "label": labels}, features=features)


def texts(hf, count):
    return hf.Dataset.from_dict(
        {"text": [f"The Mill {i}" for i in range(count)], "label": [i % 2 for i in range(count)]}
    )


def test_without_the_package_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(InputError, match="needs the package datasets: pip install datasets"):
        open_saved(tmp_path)


def test_images_with_named_labels(hf, tmp_path):
    hf.DatasetDict({"train": images(hf, [0, 1, 0, 1]), "test": images(hf, [1])}).save_to_disk(tmp_path / "set")
    data = load_images(f"datasets:{tmp_path / 'set'}")
    assert (data.classes, data.train.y.tolist(), data.test.y.tolist()) == (("cat", "dog"), [0, 1, 0, 1], [1])
    assert torch.equal(data.train.x[:, 0, 0, 0], torch.tensor([7, 27, 7, 27], dtype=torch.uint8))
    config = from_dict({"clients": 2, "data": {"name": f"datasets:{tmp_path / 'set'}", "image_size": 8}})
    assert make_dry_problem(config).examples == make_problem(config).examples == 4


def test_texts_with_labels(hf, tmp_path):
    texts(hf, 20).save_to_disk(tmp_path / "set")
    rows = read_saved(tmp_path / "set", 0.2)
    assert (len(rows.train), len(rows.test), label_names(rows)) == (16, 4, ("0", "1"))
    model = save_bert(tmp_path / "bert")
    config = from_dict({"data": {"name": f"datasets:{tmp_path / 'set'}"}, "model": {"name": f"hf:{model}"}})
    assert config.optimizer.name == "adamw"
    assert make_problem(config).classes == ("0", "1")


def test_what_does_not_fit_is_refused(hf, tmp_path):
    hf.Dataset.from_dict({"a": [1]}).save_to_disk(tmp_path / "columns")
    with pytest.raises(InputError, match=r"columns has a: give prompt and completion or text and label"):
        read_saved(tmp_path / "columns", 0.2)
    hf.DatasetDict({"valid": texts(hf, 4)}).save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match="splits has valid: it must have train"):
        open_saved(tmp_path / "splits")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="nothing is not a directory that datasets has saved"):
        open_saved(tmp_path / "nothing")
    labels = hf.Dataset.from_dict({"text": ["x"] * 9, "label": [0, 1, 5] * 3})
    hf.DatasetDict({"train": labels, "test": labels}).save_to_disk(tmp_path / "labels")
    with pytest.raises(InputError, match=r"The label 5 in row 2 of train in .*labels is out of range"):
        label_names(read_saved(tmp_path / "labels", 0.2))


@pytest.mark.parametrize("labels", [[1, 2, 3, 1], [0, 5, 0, 5], [3_000_000_000, 0, 1, 2]])
def test_numbers_of_classes_have_no_gaps(hf, tmp_path, labels):
    table = images(hf, [0, 1, 0, 1])
    features = hf.Features({**table.features, "label": hf.Value("int64")})
    plain = table.remove_columns("label").add_column("label", labels).cast(features)
    hf.DatasetDict({"train": plain, "test": plain}).save_to_disk(tmp_path / "set")
    with pytest.raises(InputError, match=r"does not occur: number the classes 0 to C-1 without gaps"):
        load_images(f"datasets:{tmp_path / 'set'}")

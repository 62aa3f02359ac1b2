"""Small data of a user's own, one of each kind, with the options that train on it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.problems.images.test_folder import fill
from tests.problems.test_saved import images
from tests.problems.texts.test_labelled import FOOD, save_bert, save_texts
from tests.texts import WORDS, save_model, save_tokenizer

SMALL: dict[str, Any] = {
    "clients": 2,
    "rounds": 3,
    "batch_size": 6,
    "upload_every": 1,
    "align_every": 2,
    "alignment": {"samples": 12, "steps": 2, "batch_size": 6},
    "device": "cpu",
}
"""What all of them have in common."""


def folder(place: Path) -> dict[str, Any]:
    """JPEG and PNG of several sizes, a folder for each class, a balanced subset of them."""
    fill(place / "photos" / "train", 8)
    fill(place / "photos" / "test", 3)
    return _images(f"folder:{place / 'photos'}", image_size=16, train_images=18)


def clients(place: Path) -> dict[str, Any]:
    """A folder for each client."""
    fill(place / "hospitals" / "clients" / "0", 4)
    fill(place / "hospitals" / "clients" / "1", 6)
    return _images(f"folder:{place / 'hospitals'}", image_size=16, partition="given")


def saved(place: Path) -> dict[str, Any]:
    """Images that `datasets` has saved."""
    hf = pytest.importorskip("datasets")
    images(hf, [0, 1] * 12).save_to_disk(place / "saved")
    return _images(f"datasets:{place / 'saved'}", image_size=16)


def _images(name: str, **data: Any) -> dict[str, Any]:
    return {"data": {"name": name, **data}, "model": {"name": "small-cnn"}}


def labels(place: Path) -> dict[str, Any]:
    """Texts with labels, and a classifier."""
    return {
        "data": {"name": f"jsonl:{save_texts(place / 'labelled.jsonl', 30)}"},
        "model": {"name": f"hf:{save_bert(place / 'bert')}", "frozen": ["bert.embeddings"]},
    }


def prompts(place: Path) -> dict[str, Any]:
    """Prompts with completions, and a language model."""
    pytest.importorskip("peft")
    pairs = [{"prompt": f"name [ {food} ]", "completion": f"The Mill serves {food} ."} for food in FOOD] * 8
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    model = save_tokenizer(save_model(place / "gpt2", "gpt2", len(WORDS.split())))
    return {"data": {"name": f"jsonl:{place / 'pairs.jsonl'}"}, "model": {"name": f"hf:{model}"}}


OWN_DATA: dict[str, Callable[[Path], dict[str, Any]]] = {
    "folder": folder,
    "clients": clients,
    "datasets": saved,
    "labels": labels,
    "prompts": prompts,
}

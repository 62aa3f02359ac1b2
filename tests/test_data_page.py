"""The page on data: every example on it is run as it stands, and has fewer than 15 lines."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from fsl_sage.cli import main
from fsl_sage.problems.images.images import KNOWN_SIZES, Sizes
from fsl_sage.records.run_directory import RunDirectory
from tests.problems.images.test_folder import fill
from tests.problems.texts.test_labelled import FOOD, save_bert
from tests.texts import WORDS, save_model, save_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "data.md"
BLOCKS = re.findall(r"^## ([^\n]*)$|```(python)?\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def sections() -> dict[str, list[tuple[str, str]]]:
    """By heading, the blocks of code below it: their language and text."""
    found: dict[str, list[tuple[str, str]]] = {}
    for heading, language, text in BLOCKS:
        if heading:
            current = found.setdefault(heading, [])
        else:
            current.append((language, text))
    return {heading: blocks for heading, blocks in found.items() if blocks}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the data that the page speaks of, and small models under the names of the real ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FSL_SAGE_DATA", str(tmp_path / "data"))
    for name in ("mine", "housing"):
        sys.modules.pop(name, None)
    fill(tmp_path / "photos" / "train", 6)
    fill(tmp_path / "photos" / "test", 2)
    fill(tmp_path / "hospitals" / "clients" / "0", 4)
    fill(tmp_path / "hospitals" / "clients" / "1", 5)
    save_bert(tmp_path / "data" / "minilm-l6")
    save_tokenizer(save_model(tmp_path / "data" / "smollm2-135m", "gpt2", len(WORDS.split())))
    reviews = [{"text": f"The Mill serves {food}", "label": FOOD[food]} for food in FOOD] * 10
    pairs = [{"prompt": f"food [ {food} ]", "completion": f"The Mill serves {food} ."} for food in FOOD] * 10
    (tmp_path / "data" / "imdb").mkdir()
    files = {"reviews.jsonl": reviews, "pairs.jsonl": pairs}
    files |= {"data/imdb/train.jsonl": reviews * 8, "data/imdb/test.jsonl": reviews * 4}
    for file, rows in files.items():
        (tmp_path / file).write_text("\n".join(map(json.dumps, rows)))
    small_fashion(tmp_path / "data" / "fashion-mnist.npz", monkeypatch)
    return tmp_path


def small_fashion(file, monkeypatch):
    """A set of noise in the form of Fashion-MNIST, in its place."""
    train, test = 500, 20
    monkeypatch.setitem(KNOWN_SIZES, "fashion-mnist", Sizes(train, test, 10, (1, 28, 28)))
    x = np.random.default_rng(0).integers(0, 256, (train + test, 28, 28), dtype=np.uint8)
    y = np.arange(train + test) % 10
    np.savez(file, x=x[:train], y=y[:train], x_test=x[train:], y_test=y[train:])


@pytest.mark.slow
@pytest.mark.parametrize("heading", sections())
def test_the_examples_run_as_they_stand(place, heading, capsys):
    if "`datasets`" in heading:
        pytest.importorskip("datasets")
    if "DataFrame" in heading:
        pytest.importorskip("pandas")
    for language, text in sections()[heading]:
        assert len(text.splitlines()) < 15
        if language == "python":
            run_python(text, place)
        else:
            for line in text.splitlines():
                if line.startswith("fsl-sage"):
                    main(shlex.split(line)[1:])
                else:
                    assert {"text", "label"} == set(json.loads(line)) or {"prompt", "completion"} == set(
                        json.loads(line)
                    )
    for directory in sorted((place / "runs").glob("*/result.json")):
        assert RunDirectory(directory.parent).metrics()


def run_python(text, place):
    named = re.match(r"# (\w+\.py)\n", text)
    if named:
        (place / named[1]).write_text(text)
    else:
        exec(compile(text, str(PAGE), "exec"), {"__name__": "page"})

"""Directories of transformers that others made: used, or refused in a sentence."""

import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from fsl_sage.errors import InputError
from fsl_sage.models.factory import _hugging_face
from fsl_sage.models.language import make_base_model
from fsl_sage.problems.texts.tokens import load_tokenizer

WEIGHTS = {
    "empty": b"",
    "noise": bytes(range(256)) * 8,
    "a header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
    "a header nested deep": (50_000).to_bytes(8, "little") + b'{"a":' * 10_000,
}
CONFIGS = {
    "empty": "",
    "nested": "[" * 100_000,
    "a number": "1",
    "a list": "[]",
    "no kind": '{"model_type": []}',
}
WRITES = {"n_layer": 10**9, "n_embd": "x", "n_head": 0, "vocab_size": 10**12, "n_positions": -5, "id2label": 5}
SEES = {"hidden_sizes": [], "num_channels": "x", "hidden_act": "nobody's", "id2label": 5, "dtype": "nobody's"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A language model and one of images, each with how it is read."""
    folder = tmp_path_factory.mktemp("foreign")
    writes = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=8, n_positions=8, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(writes).save_pretrained(folder / "writes")
    sees = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)
    ResNetForImageClassification(sees).save_pretrained(folder / "sees")
    return {
        folder / "writes": lambda path: make_base_model(f"hf:{path}"),
        folder / "sees": lambda path: _hugging_face(str(path), 3, (3, 32, 32)),
    }


def each_spoilt(made, name, contents):
    """Every model with one of its files replaced, one content after the other."""
    for path, read in made.items():
        file = path / name
        whole = file.read_bytes()
        for content in contents(path) if callable(contents) else contents:
            file.write_bytes(content)
            yield path, read
        file.write_bytes(whole)
        assert read(path) is not None


def test_weights_that_cannot_be_read(made):
    for path, read in each_spoilt(made, "model.safetensors", WEIGHTS.values()):
        with pytest.raises(InputError, match=path.name):
            read(path)


def test_weights_of_another_model(made, tmp_path):
    save_file({"transformer.wte.weight": torch.zeros(3)}, tmp_path / "other.safetensors", {"format": "pt"})
    path, read = next(iter(made.items()))
    for _ in each_spoilt({path: read}, "model.safetensors", [(tmp_path / "other.safetensors").read_bytes()]):
        with pytest.raises(InputError, match="cannot be made: RuntimeError"):
            read(path)


def test_configurations_that_are_none(made):
    for path, read in each_spoilt(made, "config.json", [text.encode() for text in CONFIGS.values()]):
        with pytest.raises(InputError, match=path.name):
            read(path)


def test_values_that_no_model_has(made):
    def changed(path):
        written = json.loads((path / "config.json").read_text())
        changes = WRITES if path.name == "writes" else SEES
        return [json.dumps({**written, name: value}).encode() for name, value in changes.items()]

    for path, read in each_spoilt(made, "config.json", changed):
        with pytest.raises(InputError, match=path.name):
            read(path)


def test_kernels_of_a_repository_are_not_fetched(made):
    def changed(path):
        written = json.loads((path / "config.json").read_text())
        kernel = {"_attn_implementation": "nobody/kernel"}
        return [json.dumps({**written, **more}).encode() for more in (kernel, {"text_config": kernel})]

    for path, read in each_spoilt(made, "config.json", changed):
        with pytest.raises(InputError, match="asks for code of the repository nobody/kernel"):
            read(path)


def test_tokenizers_that_are_none(tmp_path):
    for text in ("", "[" * 100_000, "1", "[]", '{"model": 5}'):
        (tmp_path / "tokenizer.json").write_text(text)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        with pytest.raises(InputError, match=r"does not hold a tokenizer: ."):
            load_tokenizer(tmp_path)

"""The adapters in a run directory are looked at before peft reads them."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from fsl_sage.config import Config, ModelConfig
from fsl_sage.errors import InputError
from fsl_sage.text.trained import _with_adapters

CONFIG = Config(model=ModelConfig(name="hf:gpt2"), lora=replace(Config().lora, rank=2))


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8))


@pytest.fixture
def folder(tmp_path):
    get_peft_model(model(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)).save_pretrained(tmp_path)
    return tmp_path


def test_adapters_are_loaded(folder):
    assert any("lora" in name for name, _ in _with_adapters(model(), folder, CONFIG).named_parameters())


@pytest.mark.parametrize(
    "change",
    [{"r": 10**9}, {"peft_type": "XLORA"}, {"peft_type": "PREFIX_TUNING"}, {"target_modules": ["nothing"]}],
    ids=str,
)
def test_adapters_of_another_kind_or_size_are_refused(folder, change):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=r"does not hold the adapters|do not fit"):
        _with_adapters(model(), folder, CONFIG)


def test_a_pickle_in_the_place_of_adapters_is_refused(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InputError, match="does not hold the adapters"):
        _with_adapters(model(), folder, CONFIG)


def test_damaged_adapters_are_refused(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"no adapters")
    with pytest.raises(InputError, match="do not fit"):
        _with_adapters(model(), folder, CONFIG)

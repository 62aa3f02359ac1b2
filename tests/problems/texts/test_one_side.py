"""One side of a language model has a run's first bits, and needs no file of the other side."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import merge
from tests.texts import FAMILIES, save_all, save_model

from fsl_sage.config import from_dict
from fsl_sage.errors import InputError
from fsl_sage.experiment.setup import make_setup

pytest.importorskip("peft")

from fsl_sage.problems.texts.one_side import load_side
from fsl_sage.split.trace.skeleton import named_tensors


def options_for(directory: Path, family: str, auxiliary: str = "head") -> dict[str, Any]:
    options = save_all(directory, family)
    save_model(directory / family, family, 40)  # Qwen's own tokenizer class adds a token
    return {**options, "lora": {"dropout": 0.0, "auxiliary": auxiliary}, "clients": 2, "device": "cpu", "seed": 3}


CHANGES: dict[str, dict[str, Any]] = {
    **{family: {} for family in FAMILIES},
    "llama, ridge": {"model": {"auxiliary": "ridge:9"}},
    "gpt2, by direction": {"alignment": {"loss": "cosine"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", CHANGES)
def test_each_part_alone_has_the_bits_of_a_whole_setup(tmp_path: Path, family: str) -> None:
    config = from_dict(merge(options_for(tmp_path, family.partition(",")[0]), CHANGES[family]))
    whole = make_setup(config).modules
    for part in ("client", "auxiliary", "server"):
        wanted = named_tensors(whole[part])
        got = named_tensors(load_side(config, [part])[part])
        assert got.keys() == wanted.keys()
        for name, tensor in got.items():
            assert torch.equal(tensor, wanted[name]), name
            assert tensor.requires_grad == wanted[name].requires_grad, name


def test_a_client_needs_no_file_of_the_servers_blocks(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = from_dict(options_for(tmp_path, "llama", "adapters"))
    file = tmp_path / "llama" / "model.safetensors"
    weights = load_file(file)
    own = {name: x for name, x in weights.items() if ".layers.4." not in name}
    assert len(own) < len(weights)
    save_file(own, file, {"format": "pt"})

    parts = load_side(config, ["client", "auxiliary"])

    z = parts["client"](input_ids=torch.tensor([[2, 3, 4]])).tensors
    assert torch.isfinite(parts["auxiliary"](*z).logits).all()
    shared = {named_tensors(parts[p])[n].data_ptr() for p, n in _TIED}
    assert len(shared) == 1, "embeddings that are tied and frozen are in memory once"
    with pytest.raises(InputError, match=r"does not have model\.layers\.4\."):
        load_side(config, ["server"])


_TIED = (("client", "model.embed_tokens.weight"), ("auxiliary", "lm_head.weight"))


def test_a_part_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no part 'clients': give some of client, server, auxiliary"):
        load_side(from_dict(options_for(tmp_path, "gpt2")), ["clients"])


def test_without_weights_there_is_nothing_to_read() -> None:
    with pytest.raises(InputError, match="hf:gpt2 has no weights to read"):
        load_side(from_dict({"data": {"name": "e2e"}, "model": {"name": "hf:gpt2"}}), ["client"])

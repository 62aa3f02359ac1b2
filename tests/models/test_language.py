"""Causal language models with adapters: cut, they are the unsplit model; only adapters are trained and travel."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsl_sage import cli
from fsl_sage.config import Config, LoRAConfig, from_dict
from fsl_sage.errors import InputError
from fsl_sage.models import (
    blocks_name,
    make_base_model,
    make_language_model,
    mask_buffers,
    save_adapters,
    tokenizer_path,
)
from fsl_sage.models.factory import make_model
from fsl_sage.models.foreign import convert_weights
from fsl_sage.problems.base import Batch
from fsl_sage.problems.parts import build_parts
from fsl_sage.problems.texts.e2e import load_e2e
from fsl_sage.problems.texts.language_modelling import LanguageModelling
from fsl_sage.problems.texts.problem import TextProblem
from fsl_sage.problems.texts.texts import TextSizes
from fsl_sage.problems.texts.tokens import load_tokenizer
from fsl_sage.roles.replica import Slots, frozen_weights
from fsl_sage.roles.work import Workbench
from fsl_sage.split import split_model
from fsl_sage.wire.message import nbytes
from tests.texts import BLOCKS, FAMILIES, SHARED, needs_e2e, save_model

CPU, META = torch.device("cpu"), torch.device("meta")
LORA = LoRAConfig(dropout=0.0)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Any]:
    """A tiny language model with adapters that do something."""

    def make(family: str, vocabulary: int = 50257) -> Any:
        model = make_language_model(f"hf:{save_model(tmp_path / family, family, vocabulary)}", LORA)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
        return model

    return make


def real_batch() -> tuple[LanguageModelling, Batch]:
    data = load_e2e(SHARED / "e2e", SHARED / "gpt2-tokenizer", train_texts=6, test_texts=1)
    task = LanguageModelling(data, CPU, longest=512)
    return task, task.training_batch(torch.arange(4), torch.Generator())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@needs_e2e
@pytest.mark.parametrize("family", FAMILIES)
def test_split_is_unsplit_on_texts_of_e2e(made: Callable[..., Any], family: str) -> None:
    model, (task, batch) = made(family), real_batch()
    whole = model(**batch.inputs).logits
    task.loss(whole, batch.target).backward()
    expected = gradients(model)
    model.zero_grad()
    split = split_model(model, f"{blocks_name(model)}.0", {"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
    smashed = split.client(**batch.inputs)
    assert len(smashed.tensors) == 1, "nothing but hidden states crosses"
    received = smashed.detached()
    output = split.server(*received.tensors).logits
    torch.testing.assert_close(output, whole, atol=1e-5, rtol=1e-5)
    task.loss(output, batch.target).backward()
    torch.autograd.backward(smashed.tensors, [tensor.grad for tensor in received.tensors])
    found = gradients(split.client) | gradients(split.server)
    assert found.keys() == expected.keys()
    assert all("lora_" in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5)


@needs_e2e
@pytest.mark.parametrize("family", FAMILIES)
def test_more_padding_changes_neither_loss_nor_cut_gradients(made: Callable[..., Any], family: str) -> None:
    model, (task, batch) = made(family), real_batch()
    split = split_model(model, f"{blocks_name(model)}.0", {"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
    (z,) = split.client(**batch.inputs).tensors
    losses, found = [], []
    for more in (0, 7):
        padded = torch.nn.functional.pad(z.detach(), (0, 0, 0, more)).requires_grad_()
        target = {name: torch.nn.functional.pad(x, (0, more)) for name, x in batch.target.items()}
        losses.append(task.loss(split.server(padded), target))
        found.append(torch.autograd.grad(losses[-1], padded)[0])
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(found[1][:, : z.shape[1]], found[0], atol=1e-6, rtol=1e-5)
    assert found[1][:, z.shape[1] :].eq(0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_only_positions_that_count_are_decoded(tmp_path: Path, family: str) -> None:
    task = LanguageModelling(None, CPU, longest=64)
    parts = small_parts(tmp_path, family)
    z = parts["client"](input_ids=torch.randint(0, 40, (2, 9))).tensors[0].detach()
    mask = torch.rand(2, 9) < 0.4
    target = {"labels": torch.randint(0, 40, (2, 9), dtype=torch.int32), "mask": mask}
    for part in ("server", "auxiliary"):
        losses, found = [], []
        for output in (lambda head, z: head(z), lambda head, z: task.output(head, [z], target)):
            leaf = z.clone().requires_grad_()
            logits = output(parts[part], leaf).logits
            losses.append(task.loss(logits, target))
            found.append(torch.autograd.grad(losses[-1], leaf)[0])
        assert logits.shape == (int(mask.sum()), 40)
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)
        assert parts[part](z).logits.shape == (2, 9, 40), "afterwards all positions are decoded again"


@pytest.mark.parametrize("family", FAMILIES)
def test_all_blocks_of_the_server_run(tmp_path: Path, family: str) -> None:
    parts = small_parts(tmp_path, family)
    z = parts["client"](input_ids=torch.zeros(2, 9, dtype=torch.int64)).tensors
    for part, wanted in (("client", 1), ("server", BLOCKS - 1), ("auxiliary", 3)):
        attentions = [m for n, m in parts[part].named_modules() if n.endswith((".attn", ".self_attn"))]
        ran: list[nn.Module] = []
        hooks = [m.register_forward_hook(lambda m, *_: ran.append(m)) for m in attentions]  # noqa: B023
        parts[part](input_ids=torch.zeros(2, 9, dtype=torch.int64)) if part == "client" else parts[part](*z)
        assert len(set(map(id, ran))) == len(ran) == wanted
        for hook in hooks:
            hook.remove()


def small_parts(tmp_path: Path, family: str, **lora: Any) -> dict[str, nn.Module]:
    name = f"hf:{save_model(tmp_path / family, family, 40)}"
    config: Config = from_dict({"model": {"name": name}, "lora": {"dropout": 0.0, **lora}})
    return build_parts(config, TextProblem(None, TextSizes(10, 10, 64)), CPU)


def test_only_adapters_travel_and_frozen_weights_are_one_tensor_everywhere(tmp_path: Path) -> None:
    parts = small_parts(tmp_path, "gpt2", auxiliary="adapters")
    for part in parts.values():
        assert all("lora_" in name for name in Slots(part).tensors())
    decoder, words = (dict(parts[p].named_parameters()) for p in ("auxiliary", "client"))
    assert decoder["lm_head.weight"] is words["transformer.wte.weight"]
    together = nbytes(frozen_weights([parts["client"], parts["auxiliary"]]))
    assert (
        together
        == nbytes(frozen_weights([parts["client"]])) + nbytes(frozen_weights([parts["auxiliary"]])) - 40 * 16 * 4
    )
    benches = [Workbench(parts).slots["server"] for _ in range(2)]
    for name, weight in benches[0].frozen().items():
        assert weight.data_ptr() == benches[1].frozen()[name].data_ptr()


@pytest.mark.parametrize(("what", "blocks"), [("head", False), ("all", True)])
def test_what_is_trained_of_an_auxiliary(tmp_path: Path, what: str, blocks: bool) -> None:
    parts = small_parts(tmp_path, "llama", auxiliary=what)
    trained = Slots(parts["auxiliary"]).tensors()
    assert {"model.norm.weight", "lm_head.weight"} <= trained.keys()
    assert any("mlp" in name for name in trained) == blocks
    server = dict(parts["server"].named_parameters())
    assert torch.equal(trained["lm_head.weight"], server["lm_head.weight"])
    assert trained["lm_head.weight"].data_ptr() != server["lm_head.weight"].data_ptr()


@pytest.mark.slow
def test_sizes_of_gpt2_medium_today_and_in_the_paper() -> None:
    config: Config = from_dict({"model": {"name": "hf:gpt2-medium"}})
    parts = build_parts(config, TextProblem(None, TextSizes(10, 10, 512)), META)
    today = {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}
    assert {part: round(count / 1e6, 2) for part, count in today.items()} == {
        "client": 65.12,
        "server": 341.56,
        "auxiliary": 89.30,
    }
    paper = {part: today[part] + mask_buffers(module) for part, module in parts.items()}
    assert {part: round(count / 1e6, 1) for part, count in paper.items()} == {
        "client": 66.2,
        "server": 365.7,
        "auxiliary": 92.4,
    }


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adapters_are_saved_in_pefts_own_format(made: Callable[..., Any], tmp_path: Path, family: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = made(family, 40)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    save_adapters(tmp_path / "adapter", f"hf:{tmp_path / family}", LORA, weights)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / family)
    tokens = torch.randint(0, 40, (2, 9))
    before = base.eval()(tokens).logits
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(input_ids=tokens).logits, model.eval()(tokens).logits)
    assert not torch.allclose(before, model(tokens).logits)


def test_weights_in_a_pickle_are_refused_and_can_be_converted(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", "opt", 40)
    weights = make_base_model(f"hf:{directory}").state_dict()
    torch.save(weights, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(InputError, match=f"can run code: convert them, .* by 'fsl-sage data convert {directory}'"):
        make_base_model(f"hf:{directory}")
    cli.main(["data", "convert", str(directory)])
    again = make_base_model(f"hf:{directory}").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    with pytest.raises(InputError, match="is there already"):
        convert_weights(directory)


def test_a_directory_without_weights_is_not_a_model_with_random_ones(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", "opt", 40)
    (directory / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights"):
        make_base_model(f"hf:{directory}")
    with pytest.raises(InputError, match=r"no pytorch_model\*\.bin"):
        convert_weights(directory)


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_converting_runs_nothing(tmp_path: Path) -> None:
    torch.save({"weight": Exploit(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="weights and nothing else"):
        convert_weights(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["strange", "opt"])
def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path, kind: str, monkeypatch) -> None:
    """transformers would ask on a terminal whether to run it."""
    directory = save_model(tmp_path / "model", "opt", 40)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": kind, "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (directory / "config.json").write_text(json.dumps(config))
    tokens = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Tokens", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    (directory / "mine.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append("asked") or "y")
    for load in (
        lambda: make_base_model(f"hf:{directory}"),
        lambda: load_tokenizer(directory),
        lambda: make_model(f"hf:{directory}", 10, (3, 32, 32)),
    ):
        with contextlib.suppress(InputError):
            load()
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_a_model_without_adapters_writes_none(tmp_path: Path) -> None:
    save_adapters(tmp_path / "adapter", "resnet18", LORA, {"fc.weight": torch.zeros(2, 2)})
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("name", "lora", "says"),
    [
        ("resnet18", LoRAConfig(), "is not a language model"),
        ("hf:nonsense", LoRAConfig(), "neither an architecture nor a directory"),
        ("hf:vit", LoRAConfig(), "has no form that writes text"),
        ("hf:gpt2", LoRAConfig(targets=("q_proj",)), "--lora.targets q_proj does not fit hf:gpt2"),
    ],
)
def test_what_cannot_be_a_language_model_is_refused(name: str, lora: LoRAConfig, says: str) -> None:
    with META, pytest.raises(InputError, match=says):
        make_language_model(name, lora)


def test_the_tokenizer_of_what_is_no_language_model_is_not_looked_for() -> None:
    with pytest.raises(InputError, match="resnet18 is not a language model"):
        tokenizer_path("resnet18", None)


def test_texts_that_a_model_has_no_places_for_are_refused(tmp_path: Path) -> None:
    """GPT-2 has a weight for each place; a Llama turns its vectors, and reads any length."""
    for family, places in (("gpt2", "n_positions"), ("llama", "max_position_embeddings")):
        save_model(tmp_path / family, family, 50, **{places: 16})
    name = f"hf:{tmp_path / 'gpt2'}"
    make_language_model(name, LoRAConfig(), 50, 16)
    with pytest.raises(InputError, match=r"Texts of 17 tokens are too long .* reads 16: give"):
        make_language_model(name, LoRAConfig(), 50, 17)
    make_language_model(f"hf:{tmp_path / 'llama'}", LoRAConfig(), 50, 17)


def test_a_configuration_inside_of_another_is_read() -> None:
    from transformers import AutoConfig

    inner = AutoConfig.for_model("gemma3").get_text_config()
    assert inner.vocab_size
    assert not hasattr(AutoConfig.for_model("gemma3"), "vocab_size")


def test_what_is_wrong_with_a_directory_is_said_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read") as caught:
        make_language_model(f"hf:{tmp_path}", LoRAConfig())
    assert "neither an architecture" not in str(caught.value)

"""Tiny language models, a tokenizer of few words and texts in the form of E2E, all made here; and the real ones."""

import csv
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_e2e = pytest.mark.skipif(
    not (SHARED / "e2e").is_dir() or not (SHARED / "gpt2-tokenizer").is_dir(),
    reason="the official files of E2E and the GPT-2 tokenizer are not in ../shared/data",
)

BLOCKS = 5
LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 16,
        "n_layer": BLOCKS,
        "n_head": 2,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": LLAMA,
    "qwen2": LLAMA,
    "opt": {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 32,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
}

NAMES = ("The Mill", "Cotto", "The Eagle", "Zizzi")
FOODS = ("Thai", "Indian", "French")
WORDS = (
    "[UNK] [EOS] name food area [ ] , || . serves in the riverside centre The Mill Cotto Eagle Zizzi Thai Indian French"
)


def save_model(directory: Path, family: str, vocabulary: int, **changes: Any) -> Path:
    """A model of transformers with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    special = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **special, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # biases and norms with values of their own
            parameter.data.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path) -> Path:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS.split())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]")
    fast.save_pretrained(directory)
    return directory


def save_rows(directory: Path, train: int = 24, test: int = 8) -> Path:
    """The official files' form, with sentences of different lengths."""
    directory.mkdir(exist_ok=True)
    for file, count in (("trainset.csv", train), ("testset_w_refs.csv", test)):
        with open(directory / file, "w", newline="", encoding="utf-8") as lines:
            writer = csv.writer(lines)
            writer.writerow(["mr", "ref"])
            for row in range(count):
                name, food = NAMES[row % 4], FOODS[row % 3]
                more = ", area[riverside]" if row % 2 else ""
                where = " in the riverside centre" if row % 2 else ""
                writer.writerow([f"name[{name}], food[{food}]{more}", f"{name} serves {food}{where}."])
    return directory


def save_all(directory: Path, family: str = "gpt2") -> dict[str, Any]:
    """Model, tokenizer and texts; returns the options of a configuration that uses them."""
    model = save_model(directory / family, family, len(WORDS.split()))
    save_tokenizer(model)
    return {
        "data": {"name": "e2e", "dir": str(save_rows(directory / "e2e")), "train_images": None, "test_images": None},
        "model": {"name": f"hf:{model}"},
        "lora": {"dropout": 0.0},
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "batch_size": 4,
        "upload_every": 1,
        "alignment": {"samples": 12, "steps": 2, "batch_size": 4},
    }

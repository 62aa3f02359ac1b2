"""Small sequence classifiers of transformers, of most of its architectures for texts, with random weights.

`python -m tests.classifiers` cuts and trains them all, or those that are named, and prints the table of docs/data.md.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from fsl_sage import Config, default_config, run
from fsl_sage.config import from_dict, from_file
from fsl_sage.errors import InputError
from fsl_sage.problems import make_problem
from fsl_sage.problems.parts import build_model
from fsl_sage.split import split_model
from tests.split.steps import assert_same_bits, split_step, whole_step
from tests.texts import save_tokenizer

VOCABULARY, WIDTH, BLOCKS = 24, 16, 3
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), BLOCKS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), BLOCKS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "hidden_dim", "dff"), 2 * WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("head_dim", "d_kv", "d_head"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    "word_embed_proj_dim": WIDTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
"""Sizes, by the names that configurations of transformers have for them; each takes those that it knows."""

OWN: dict[str, dict[str, Any]] = {
    "albert": {},
    "arcee": {},
    "bart": {},
    "bert": {},
    "big_bird": {"attention_type": "original_full"},
    "biogpt": {},
    "bloom": {},
    "camembert": {},
    "convbert": {},
    "ctrl": {},
    "data2vec-text": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
    "deepseek_v3": {"n_group": 1, "topk_group": 1},
    "distilbert": {},
    "electra": {},
    "ernie": {},
    "esm": {"position_embedding_type": "rotary"},
    "eurobert": {},
    "exaone4": {},
    "falcon": {},
    "flaubert": {},
    "fnet": {},
    "funnel": {"block_sizes": [1, 1, 1]},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 4},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {"rotary_dim": 4},
    "gte": {},
    "helium": {},
    "ibert": {},
    "llama": {},
    "longformer": {"attention_window": 4},
    "mbart": {},
    "megatron-bert": {},
    "ministral": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {},
    "mobilebert": {"intra_bottleneck_size": 8, "true_hidden_size": 8},
    "modernbert": {},
    "modernbert-decoder": {},
    "mpnet": {},
    "mpt": {},
    "mra": {},
    "mt5": {},
    "mvp": {},
    "nemotron": {},
    "nomic_bert": {},
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "openai-gpt": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "plbart": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 3, "attention_head_size": 8},
    "rembert": {"input_embedding_size": WIDTH, "output_embedding_size": WIDTH},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roformer": {},
    "smollm3": {},
    "squeezebert": {},
    "stablelm": {},
    "starcoder2": {},
    "t5": {},
    "umt5": {},
    "xlm": {},
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xlnet": {},
    "xmod": {"default_language": "en_XX"},
    "yoso": {"use_expectation": True},
}
"""The architectures, with what each needs besides."""


FREEZE = {
    "deberta": ["deberta.encoder.rel_embeddings"],
    "deberta-v2": ["deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm"],
    "mpnet": ["mpnet.encoder.relative_attention_bias"],
    "roformer": ["roformer.encoder.embed_positions"],
}
"""What must be frozen, because all blocks use it."""
CUT = {"albert": "albert.encoder.embedding_hidden_mapping_in"}
"""Where to cut what has no usual cut."""
REFUSED = ("bart", "mbart", "mt5", "mvp", "plbart", "reformer", "t5", "umt5", "xlnet")
FOODS = {"Thai": "asian", "Indian": "asian", "French": "european"}


def small_config(architecture: str) -> Any:
    """A configuration of transformers with small sizes and no dropout."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(architecture)
    known = usual.to_dict()
    sizes = {key: value for key, value in COMMON.items() if key in known or key in usual.attribute_map}
    dropouts = {key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float)}
    return AutoConfig.for_model(architecture, **{**sizes, **dropouts, **OWN[architecture]})


def classifier_run(directory: Path, architecture: str, **model: Any) -> Config:
    """A round of FSL-SAGE, alignment included, of a classifier with random weights that is saved here.

    Args:
        directory: Of the model, its tokenizer, the texts and the run.
        architecture: Of `OWN`.
        model: Options of the model.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    path = directory / "model"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made: Any = AutoModelForSequenceClassification.from_config(small_config(architecture))
    logging.disable_progress_bar()
    made.save_pretrained(path)
    logging.enable_progress_bar()
    name = f"jsonl:{_save_texts(directory / 'texts.jsonl')}"
    values = {
        "rounds": 1,
        "clients": 2,
        "batch_size": 6,
        "upload_every": 1,
        # The tokenizer stands apart: beside some models transformers takes it for one of that model's own kind.
        "data": {"name": name, "tokenizer": str(save_tokenizer(directory / "words"))},
        "model": {"name": f"hf:{path}", **model},
        "optimizer": {"schedule": "constant", "warmup": 0},
        "alignment": {"samples": 10, "steps": 2, "batch_size": 6},
        "device": "cpu",
        "out": str(directory / "run"),
    }
    return from_file(from_dict(values, default_config(name)), "tests", of_several=True)


def _save_texts(file: Path) -> Path:
    """Texts of 4 to 12 words."""
    rows = [(food, " in the riverside centre" * (row % 3)) for row, food in enumerate([*FOODS] * 10)]
    lines = (json.dumps({"text": f"The Mill serves {food}{more}", "label": FOODS[food]}) for food, more in rows)
    file.write_text("\n".join(lines))
    return file


def assert_cut_is_the_whole(config: Config) -> str:
    """One step through the cut has the bits of the unsplit model: outputs, gradients, merged state. Returns the cut."""
    problem = make_problem(config)
    model: nn.Module = build_model(config, problem, torch.device("cpu")).train()
    inputs = problem.make_task(config, torch.device("cpu")).training_batch(torch.arange(6), torch.Generator()).inputs
    cut = config.model.cut or problem.usual_cut(config, model)
    split = split_model(model, cut, inputs)
    for whole, parts in zip(whole_step(model, inputs, ()), split_step(split, inputs), strict=True):
        found = [dict(enumerate(x)) if isinstance(x, list) else x for x in (whole, parts)]
        assert_same_bits(*found)
    return cut


def tried(architecture: str, directory: Path) -> str:
    """A row of the table: what became of an architecture, with the options that it needs."""
    options: dict[str, Any] = {}
    if architecture in FREEZE:
        options["frozen"] = FREEZE[architecture]
    if architecture in CUT:
        options["cut"] = CUT[architecture]
    config = classifier_run(directory, architecture, **options)
    try:
        cut = assert_cut_is_the_whole(config)
    except InputError as error:
        return f"refused: {str(error).replace(str(directory), '')}"
    assert run(config).metrics[0]["aligned"]
    needs = [
        f"`--model.{key} {value if isinstance(value, str) else ' '.join(value)}`" for key, value in options.items()
    ]
    return f"cut at `{cut}`" + (f", with {needs[0]}" if needs else "")


if __name__ == "__main__":
    print("| architecture | |\n|---|---|")
    for chosen in sys.argv[1:] or OWN:
        with TemporaryDirectory() as folder:
            print(f"| {chosen} | {tried(chosen, Path(folder))} |", flush=True)

"""Small sequence classifiers of transformers, of all its architectures for texts but one, with random weights.

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
from fsl_sage.models import make_text_classifier
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
    **dict.fromkeys(("depth", "num_blocks"), 1),
    **dict.fromkeys(("out_hidden_size", "d_latents", "entity_emb_size", "mm_tokens_per_image"), WIDTH),
    **dict.fromkeys(("num_self_attention_heads", "num_cross_attention_heads"), 2),
    **dict.fromkeys(("num_latents", "pronunciation_embed_dim", "shape_embed_dim"), 8),
    **dict.fromkeys(("entity_vocab_size", "pronunciation_vocab_size", "shape_vocab_size"), VOCABULARY),
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
"""Sizes, by the names that configurations of transformers have for them; each takes those that it knows."""

OWN: dict[str, dict[str, Any]] = {
    "albert": {},
    "arcee": {},
    "axk1": {"n_group": 1, "topk_group": 1},
    "axk2": {},
    "bart": {},
    "bert": {},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "biogpt": {},
    "bloom": {},
    "camembert": {},
    "canine": {},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "convbert": {},
    "ctrl": {},
    "data2vec-text": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
    "deepseek_v2": {},
    "deepseek_v3": {"n_group": 1, "topk_group": 1},
    "diffllama": {},
    "distilbert": {},
    "doge": {},
    "electra": {},
    "ernie": {},
    "esm": {"position_embedding_type": "rotary"},
    "esmc": {},
    "eurobert": {},
    "exaone4": {},
    "falcon": {},
    "flaubert": {},
    "fnet": {},
    "funnel": {"block_sizes": [1, 1, 1]},
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "gpt-sw3": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 4},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {"rotary_dim": 4},
    "gte": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "ibert": {},
    "jamba": {},
    "jetmoe": {},
    "jina_embeddings_v3": {},
    "layoutlm": {},
    "layoutlmv3": {"coordinate_size": 2, "shape_size": 4},
    "lilt": {"hidden_size": 24},
    "llama": {},
    "longformer": {"attention_window": 4},
    "luke": {},
    "markuplm": {},
    "mbart": {},
    "megatron-bert": {},
    "minicpm3": {},
    "minimax": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {"sliding_window": 4},
    "mistral4": {"head_dim": 16},
    "mixtral": {},
    "mobilebert": {"intra_bottleneck_size": 8, "true_hidden_size": 8},
    "modernbert": {},
    "modernbert-decoder": {},
    "modernvbert": {},
    "mpnet": {},
    "mpt": {},
    "mra": {},
    "mt5": {"decoder_start_token_id": 0},
    "mvp": {},
    "nemotron": {},
    "nomic_bert": {},
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "openai-gpt": {},
    "opt": {},
    "perceiver": {"num_self_attends_per_block": BLOCKS},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "plbart": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 3, "attention_head_size": 8},
    "rembert": {"input_embedding_size": WIDTH, "output_embedding_size": WIDTH},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roc_bert": {},
    "roformer": {},
    "seed_oss": {},
    "smollm3": {},
    "squeezebert": {},
    "stablelm": {},
    "starcoder2": {},
    "t5": {"decoder_start_token_id": 0},
    "t5gemma": {},
    "t5gemma2": {},
    "tapas": {},
    "ultrabert": {},
    "ultravbert": {},
    "umt5": {},
    "xlm": {},
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xlnet": {},
    "xmod": {"default_language": "en_XX"},
    "yoso": {"use_expectation": True},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": [*["linear_attention"] * 2, *["hybrid"] * 2]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
}
"""The architectures, with what each needs besides."""


FREEZE = {
    "deberta": ["deberta.encoder.rel_embeddings"],
    "deberta-v2": ["deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm"],
    "layoutlmv3": [f"layoutlmv3.encoder.rel_pos_{kind}bias" for kind in ("", "x_", "y_")],
    "mpnet": ["mpnet.encoder.relative_attention_bias"],
    "roformer": ["roformer.encoder.embed_positions"],
}
"""What must be frozen, because all blocks use it."""
CUT = {
    "albert": "albert.encoder.embedding_hidden_mapping_in",
    "perceiver": "perceiver.encoder.cross_attention",
}
"""Where to cut what has no usual cut."""
ROUNDED = ("mt5", "t5", "zamba", "zamba2")
"""Those whose gradients through the cut agree with the model's to rounding: they are summed in another order."""
REFUSED = ("reformer",)
FOODS = {"Thai": "asian", "Indian": "asian", "French": "european"}


def small_config(architecture: str) -> Any:
    """A configuration of transformers with small sizes and no dropout."""
    from transformers import AutoConfig

    small = _small_values(AutoConfig.for_model(architecture))
    return AutoConfig.for_model(architecture, **{"num_labels": 2, **small, **OWN[architecture]})


def _small_values(usual: Any) -> dict[str, Any]:
    """What differs from the usual values of a configuration, and of those inside of it."""
    known = usual.to_dict()
    sizes = {key: value for key, value in COMMON.items() if key in known or key in usual.attribute_map}
    dropouts = {key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float)}
    inner = {key: getattr(usual, key) for key in usual.sub_configs if getattr(usual, key) is not None}
    small = {key: {"model_type": config.model_type, **_small_values(config)} for key, config in inner.items()}
    return {**sizes, **dropouts, **small}


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


def assert_logits_are_those_of_transformers(name: str) -> None:
    """A classifier in the form that can be cut has the logits that transformers computes, on texts of some lengths."""
    from transformers import AutoModelForSequenceClassification

    length, most, ends = 12, VOCABULARY - 1, torch.tensor([12, 7, 3, 12])
    place = torch.arange(length)
    tokens = torch.randint(2, most, (4, length), generator=torch.Generator().manual_seed(0))
    tokens = tokens.masked_fill(place == ends[:, None] - 1, 1).masked_fill(place >= ends[:, None], 0)
    inputs = {"input_ids": tokens, "attention_mask": (place < ends[:, None]).long()}
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(name.removeprefix("hf:"), num_labels=2).eval()
    mine: Any = make_text_classifier(name, 2, VOCABULARY, length, padding=0).eval()
    with torch.no_grad():
        found, wanted = mine(**inputs), theirs(**inputs).logits
    torch.testing.assert_close(getattr(found, "logits", found), wanted)


def assert_cut_is_the_whole(config: Config) -> str:
    """One step through the cut has the bits of the unsplit model: outputs, gradients, merged state. Returns the cut."""
    problem = make_problem(config)
    model: nn.Module = build_model(config, problem, torch.device("cpu")).train()
    inputs = problem.make_task(config, torch.device("cpu")).training_batch(torch.arange(6), torch.Generator()).inputs
    cut = config.model.cut or problem.usual_cut(config, model)
    split = split_model(model, cut, inputs)
    for whole, parts in zip(whole_step(model, inputs, ()), split_step(split, inputs), strict=True):
        found = [dict(enumerate(x)) if isinstance(x, list) else x for x in (whole, parts)]
        if model.config.model_type in ROUNDED:  # type: ignore[union-attr]
            torch.testing.assert_close(*found)
        else:
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
        assert_logits_are_those_of_transformers(config.model.name)
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
    rows = []
    for chosen in sys.argv[1:] or OWN:
        with TemporaryDirectory() as folder:
            rows.append(tried(chosen, Path(folder)))
        print(f"| {chosen} | {rows[-1]} |", flush=True)
    print(f"\n{sum(not row.startswith('refused') for row in rows)} of {len(rows)} run.")

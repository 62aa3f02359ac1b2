"""Small models of many families, with random weights and without dropout."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.models import ResNet18, SmallCNN

Example = Tensor | dict[str, Any]
BATCH, LENGTH, VOCABULARY, WIDTH = 2, 6, 24, 16


def _images(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def _tokens(**more: Any) -> dict[str, Any]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, LENGTH - 2 :] = 0
    return {"input_ids": torch.randint(5, VOCABULARY, (BATCH, LENGTH)), "attention_mask": mask, **more}


def _vision(model: str, config: str, example: Callable[[], Example] = _images, **options: Any) -> Callable[[], Any]:
    def build() -> tuple[nn.Module, Example]:
        import transformers

        options.setdefault("num_labels", 5)
        return getattr(transformers, model)(getattr(transformers, config)(**options)), example()

    return build


def _text(model: str, config: str, **options: Any) -> Callable[[], Any]:
    def build() -> tuple[nn.Module, Example]:
        import transformers

        common = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
        return getattr(transformers, model)(getattr(transformers, config)(**common, **options)), _tokens()

    return build


def _lora(base: Callable[[], Any], targets: list[str]) -> Callable[[], Any]:
    def build() -> tuple[nn.Module, Example]:
        from peft import LoraConfig, get_peft_model

        model, example = base()
        lora = LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, fan_in_fan_out="c_attn" in targets)
        return get_peft_model(model, lora), example

    return build


BERT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 32,
}
GPT2 = {
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}

gpt2 = _text("GPT2LMHeadModel", "GPT2Config", **GPT2)
llama = _text("LlamaForCausalLM", "LlamaConfig", **LLAMA)

FAMILIES: dict[str, Callable[[], tuple[nn.Module, Example]]] = {
    # the project's own
    "resnet18": lambda: (ResNet18(), torch.randn(BATCH, 3, 32, 32)),
    "small_cnn": lambda: (SmallCNN(), torch.randn(BATCH, 3, 32, 32)),
    # vision
    "resnet": _vision(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
    ),
    "vit": _vision("ViTForImageClassification", "ViTConfig", **VIT),
    "deit": _vision("DeiTForImageClassification", "DeiTConfig", **VIT),
    "beit": _vision("BeitForImageClassification", "BeitConfig", drop_path_rate=0.0, **VIT),
    "convnext": _vision(
        "ConvNextForImageClassification", "ConvNextConfig", num_stages=2, hidden_sizes=[8, 16], depths=[1, 2]
    ),
    "swin": _vision(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
    ),
    "regnet": _vision(
        "RegNetForImageClassification",
        "RegNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        groups_width=4,
    ),
    "efficientnet": _vision(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        image_size=32,
        width_coefficient=0.1,
        depth_coefficient=0.1,
        hidden_dim=128,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
    ),
    "mobilenet_v2": _vision(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.25, classifier_dropout_prob=0.0
    ),
    "poolformer": _vision(
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        drop_path_rate=0.0,
    ),
    # text
    "gpt2": gpt2,
    "bert": _text("BertForSequenceClassification", "BertConfig", **BERT),
    "bert_masked": _text("BertForMaskedLM", "BertConfig", **BERT),
    "distilbert": _text(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        dim=WIDTH,
        n_layers=2,
        n_heads=2,
        hidden_dim=2 * WIDTH,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
    ),
    "roberta": _text("RobertaForSequenceClassification", "RobertaConfig", **BERT),
    "electra": _text("ElectraForSequenceClassification", "ElectraConfig", embedding_size=8, **BERT),
    "albert": _text(
        "AlbertForSequenceClassification", "AlbertConfig", embedding_size=8, classifier_dropout_prob=0.0, **BERT
    ),
    "llama": llama,
    "mistral": _text("MistralForCausalLM", "MistralConfig", sliding_window=4, **LLAMA),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
    "gemma": _text("GemmaForCausalLM", "GemmaConfig", head_dim=8, **LLAMA),
    "phi": _text(
        "PhiForCausalLM",
        "PhiConfig",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=32,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    ),
    "opt": _text(
        "OPTForCausalLM",
        "OPTConfig",
        hidden_size=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=WIDTH,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "gpt_neox": _text(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "gpt_neo": _text(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        hidden_size=WIDTH,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=32,
        **{"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "bloom": _text(
        "BloomForCausalLM",
        "BloomConfig",
        hidden_size=WIDTH,
        n_layer=2,
        n_head=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "gpt2_lora": _lora(gpt2, ["c_attn"]),
    "llama_lora": _lora(llama, ["q_proj", "v_proj"]),
}

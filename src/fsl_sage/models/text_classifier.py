"""Sequence classifiers of transformers: made, refused where they cannot be cut or cannot read the texts, and cut."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from fsl_sage.errors import InputError
from fsl_sage.models.encoder_decoder import EncoderDecoderClassifier
from fsl_sage.models.language import check_vocabulary, make_of_transformers
from fsl_sage.models.last_token import LastTokenClassifier, classifies_by_last_token

_ENDS_OF_BLOCKS = {"xlm": "transformer.layer_norm2", "flaubert": "transformer.layer_norm2"}
"""Models whose blocks are spread over several lists: the list of the modules that end them."""
_UNCUT = {
    "reformer": "computes all blocks anew in one backward pass, so it cannot be cut between them",
}
"""Why a kind of model that could be made is refused."""


def make_text_classifier(name: str, classes: int, vocabulary: int, length: int, padding: int) -> nn.Module:
    """The sequence classifier `hf:PATH` with its weights, or `hf:ARCHITECTURE` with random ones; all of it is trained.

    Args:
        name: As --model.name.
        classes: The number of classes; a head for them is drawn where the directory has none.
        vocabulary: The number of tokens that it must know.
        length: The number of tokens that it must read.
        padding: The token that stands behind the end of a text.
    """

    def fit(config: Any) -> None:
        _refuse_kind(name, config)
        config.num_labels = classes
        config.problem_type = "single_label_classification"
        for own in (config, *_inner_configs(config)):
            own.pad_token_id = padding
            own.use_cache = own.use_mems_eval = False  # XLNet's name for it is the second
        text = text_config(config)
        if hasattr(text, "vocab_size"):  # Canine reads characters, whatever their numbers
            check_vocabulary(name, vocabulary, text.vocab_size)
        _check_only_length(name, text, length)

    made: nn.Module = make_of_transformers(
        name, "AutoModelForSequenceClassification", "classifies texts", fit, ignore_mismatched_sizes=True
    )
    _check_length(name, made, length)
    if made.config.is_encoder_decoder:  # type: ignore[union-attr]
        return EncoderDecoderClassifier(made)
    return LastTokenClassifier(made) if classifies_by_last_token(made) else made


def text_config(config: Any) -> Any:
    """The configuration of what reads the text: of the encoder, of the one for texts, or the whole."""
    encoder = getattr(config, "encoder", None) if config.is_encoder_decoder else None
    return config if config.is_encoder_decoder and encoder is None else (encoder or config).get_text_config()


def _inner_configs(config: Any) -> Iterator[Any]:
    """The configurations inside of one, such as an encoder's and a decoder's."""
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        if inner is not None:  # as in ESM, where only a model that folds proteins has one
            yield inner
            yield from _inner_configs(inner)


def _refuse_kind(name: str, config: Any) -> None:
    """Refuse what could be made but not cut."""
    reason = _UNCUT.get(config.model_type)
    if reason is not None:
        raise InputError(f"--model.name {name} {reason}: give an encoder, such as BERT, or a decoder, such as GPT-2.")
    if getattr(config, "attention_type", None) == "block_sparse":
        raise InputError(
            f"--model.name {name} replaces its own blocks where a text is short, so its parts would not stay what "
            'they are: write "attention_type": "original_full" into its config.json.'
        )
    if getattr(config, "default_language", "") is None:
        raise InputError(
            f"--model.name {name} does not know which language it reads: write one of {', '.join(config.languages)} as "
            '"default_language" into its config.json.'
        )


def _check_length(name: str, model: nn.Module, length: int) -> None:
    most = getattr(text_config(model.config), "max_position_embeddings", None)
    if most is None or most <= 0:  # XLNet says -1: any length
        return
    # RoBERTa and its kind count places from behind that of padding.
    places = (module for path, module in model.named_modules() if "position" in path)
    padded = [each.padding_idx for each in places if isinstance(each, nn.Embedding) and each.padding_idx is not None]
    most -= max(padded, default=-1) + 1
    if most < length:
        raise InputError(
            f"Texts of {length} tokens are too long for --model.name {name}, which reads {most}: give "
            f"--data.sequence-length {most} and --data.long-texts cut."
        )


def _check_only_length(name: str, config: Any, length: int) -> None:
    only = getattr(config, "segment_means_seq_len", None)  # Nystromformer's
    if only not in (None, length, config.to_dict().get("num_landmarks")):
        raise InputError(
            f"--model.name {name} reads texts of {only} tokens and no others, and the longest here has {length}: give "
            f'"num_landmarks" in its config.json the value of "segment_means_seq_len", {only}, for ordinary attention.'
        )


def usual_text_cut(model: nn.Module) -> str:
    """Where a classifier is cut if nothing is said: the name of its first block, or of what ends it."""
    config: Any = model.config
    text = text_config(config)
    layers = getattr(text, "num_hidden_layers", None)
    if config.model_type in _ENDS_OF_BLOCKS:
        return f"{_ENDS_OF_BLOCKS[config.model_type]}.0"
    reader = next((n for n, m in model.named_modules() if type(getattr(m, "config", None)) is type(text)), "")
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.startswith(reader):  # not among the blocks for images
            blocks = list(_leaves(name, module))
            if len(blocks) == layers:
                return blocks[0]
    why = f"no list of {layers} blocks" if layers else "no number of blocks in its configuration"
    raise InputError(
        f"A {config.model_type} has {why}, so it has no usual cut (one block that runs again and again has the same "
        "weights on both sides): give --model.cut; 'fsl-sage cuts' lists what goes."
    )


def _leaves(name: str, blocks: nn.ModuleList) -> Iterator[str]:
    """The names of the modules in a list, and in lists inside of it."""
    for key, block in blocks.named_children():
        if isinstance(block, nn.ModuleList):
            yield from _leaves(f"{name}.{key}", block)
        else:
            yield f"{name}.{key}"

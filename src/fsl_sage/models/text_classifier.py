"""Sequence classifiers of transformers: made, refused where they cannot be cut or cannot read the texts, and cut."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from fsl_sage.errors import InputError
from fsl_sage.models.language import check_vocabulary, make_of_transformers
from fsl_sage.models.last_token import LastTokenClassifier, classifies_by_last_token

_ENDS_OF_BLOCKS = {"xlm": "transformer.layer_norm2", "flaubert": "transformer.layer_norm2"}
"""Models whose blocks are spread over several lists: the list of the modules that end them."""
_UNCUT = {
    "reformer": "computes all blocks anew in one backward pass, so it cannot be cut between them",
    "xlnet": "puts the tokens of a batch before its texts, so what crosses a cut cannot be divided into texts",
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
        config.pad_token_id = padding
        config.use_cache = False
        check_vocabulary(name, vocabulary, config.vocab_size)
        _check_length(name, config, length)

    made: nn.Module = make_of_transformers(
        name, "AutoModelForSequenceClassification", "classifies texts", fit, ignore_mismatched_sizes=True
    )
    return LastTokenClassifier(made) if classifies_by_last_token(made) else made


def _refuse_kind(name: str, config: Any) -> None:
    """Refuse what could be made but not cut."""
    reason = _UNCUT.get(config.model_type)
    if config.is_encoder_decoder:
        reason = "reads a text twice, in its encoder and in its decoder, so its tokens would have to cross the cut"
    if reason is not None:
        raise InputError(f"--model.name {name} {reason}: give an encoder, such as BERT, or a decoder, such as GPT-2.")
    if getattr(config, "default_language", "") is None:
        raise InputError(
            f"--model.name {name} does not know which language it reads: write one of {', '.join(config.languages)} as "
            '"default_language" into its config.json.'
        )


def _check_length(name: str, config: Any, length: int) -> None:
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise InputError(
            f"Texts of {length} tokens are too long for --model.name {name}, which reads {most}: give "
            f"--data.sequence-length {most} and --data.long-texts cut."
        )
    only = getattr(config, "segment_means_seq_len", None)  # Nystromformer's
    if only not in (None, length, config.to_dict().get("num_landmarks")):
        raise InputError(
            f"--model.name {name} reads texts of {only} tokens and no others, and the longest here has {length}: give "
            f'"num_landmarks" in its config.json the value of "segment_means_seq_len", {only}, for ordinary attention.'
        )


def usual_text_cut(model: nn.Module) -> str:
    """Where a classifier is cut if nothing is said: the name of its first block, or of what ends it."""
    config: Any = model.config
    if config.model_type in _ENDS_OF_BLOCKS:
        return f"{_ENDS_OF_BLOCKS[config.model_type]}.0"
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            blocks = list(_leaves(name, module))
            if len(blocks) == config.num_hidden_layers:
                return blocks[0]
    raise InputError(
        f"A {config.model_type} has no list of {config.num_hidden_layers} blocks, so it has no usual cut (one block "
        "that runs again and again has the same weights on both sides): give --model.cut; 'fsl-sage cuts' lists what "
        "goes."
    )


def _leaves(name: str, blocks: nn.ModuleList) -> Iterator[str]:
    """The names of the modules in a list, and in lists inside of it."""
    for key, block in blocks.named_children():
        if isinstance(block, nn.ModuleList):
            yield from _leaves(f"{name}.{key}", block)
        else:
            yield f"{name}.{key}"

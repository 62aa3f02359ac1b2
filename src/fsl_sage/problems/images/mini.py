"""`cifar10-mini`: 5,000 training and 1,000 test images of CIFAR-10 that come with the package.

They are the first 500 (100) of each class in the official order, without loss. One mosaic in lossless WebP is a third
smaller than the pixels deflated in an .npz, and decodes in a fifth of a second.
"""

import io
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fsl_sage.errors import InputError
from fsl_sage.problems.images.cifar import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD
from fsl_sage.problems.images.images import ImageData, Images
from fsl_sage.problems.images.npz import read_arrays

MINI_PATH = Path(__file__).with_name("cifar10_mini.npz")
_COLUMNS = 50
_SIDE = 32


@cache
def read_mini(path: Path = MINI_PATH) -> ImageData:
    """The 5,000 training and 1,000 test images of CIFAR-10 that come with the package."""
    arrays = read_arrays(path)
    try:
        train = _unpack(arrays["train_webp"], arrays["y"])
        test = _unpack(arrays["test_webp"], arrays["y_test"])
    except (KeyError, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): install the package again, Pillow with WebP") from error
    return ImageData("cifar10-mini", train, test, CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD)


def write_mini(train: Images, test: Images, path: Path = MINI_PATH) -> None:
    """Store class-balanced subsets; the number of images must be a multiple of 50, the width of the mosaic."""
    np.savez(
        path,
        train_webp=_pack(train),
        y=train.y.numpy().astype(np.uint8),
        test_webp=_pack(test),
        y_test=test.y.numpy().astype(np.uint8),
    )


def _pack(images: Images) -> np.ndarray:
    """The images [N, 3, 32, 32] as the bytes of one WebP file, row by row of 50."""
    tiles = images.x.numpy().reshape(-1, _COLUMNS, 3, _SIDE, _SIDE)
    mosaic = tiles.transpose(0, 3, 1, 4, 2).reshape(-1, _COLUMNS * _SIDE, 3)
    buffer = io.BytesIO()
    Image.fromarray(mosaic).save(buffer, "WEBP", lossless=True, quality=100, method=6)
    return np.frombuffer(buffer.getvalue(), dtype=np.uint8)


def _unpack(webp: np.ndarray, labels: np.ndarray) -> Images:
    with Image.open(io.BytesIO(webp.tobytes())) as image:
        mosaic = np.asarray(image.convert("RGB"))
    tiles = mosaic.reshape(-1, _SIDE, _COLUMNS, _SIDE, 3).transpose(0, 2, 4, 1, 3)
    x = np.ascontiguousarray(tiles.reshape(-1, 3, _SIDE, _SIDE))
    return Images(torch.from_numpy(x), torch.from_numpy(labels.astype(np.int64)))

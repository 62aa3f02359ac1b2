"""CIFAR-10 and CIFAR-100 as they are officially distributed: pickled batches, in a folder or in its archive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fsl_sage.errors import InputError
from fsl_sage.problems.download import read_members
from fsl_sage.problems.images.images import KNOWN_SIZES, ImageData, Images
from fsl_sage.problems.images.npz import images_in, read_arrays
from fsl_sage.problems.images.unpickling import unpickle_batch
from fsl_sage.reading import short

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_CIFAR100_NAMES.split())
_LARGEST_FILE = 256 * 2**20
"""Bytes; the official training file of CIFAR-100 has 155 million."""
_REMEDY = "put the official files there, or use another data directory"


@dataclass(frozen=True)
class Cifar:
    """What the official distribution of a set looks like."""

    name: str
    url: str
    checksum: str
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    label_key: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def archive(self) -> str:
        """The name of the official archive."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files in its folder."""
        return (*self.train_files, self.test_file)


CIFAR: dict[str, Cifar] = {
    "cifar10": Cifar(
        name="cifar10",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        checksum="sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        folder="cifar-10-batches-py",
        train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test_file="test_batch",
        label_key="labels",
        classes=CIFAR10_CLASSES,
        mean=CIFAR10_MEAN,
        std=CIFAR10_STD,
    ),
    "cifar100": Cifar(
        name="cifar100",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        checksum="sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        folder="cifar-100-python",
        train_files=("train",),
        test_file="test",
        label_key="fine_labels",
        classes=CIFAR100_CLASSES,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def find_cifar(cifar: Cifar, directory: Path) -> Path | None:
    """Where the set lies in a data directory: the stored .npz, or the folder of the official batches."""
    stored = directory / f"{cifar.name}.npz"
    if stored.is_file():
        return stored
    for folder in (directory / cifar.folder, directory):
        if any((folder / file).is_file() for file in cifar.files):
            return folder
    return None


def read_cifar(cifar: Cifar, path: Path) -> ImageData:
    """The set from where `find_cifar` found it."""
    if path.is_dir():
        return _read_batches(cifar, lambda file: _read_file(path / file), path)
    arrays = read_arrays(path, remedy=f"remove it and run: fsl-sage data get {cifar.name}")
    return whole_set(cifar, images_in(arrays, "x", "y", path), images_in(arrays, "x_test", "y_test", path), path)


def read_archive(cifar: Cifar, archive: Path) -> ImageData:
    """The set from the official archive, whose checksum has been verified."""
    members = read_members(archive, [f"{cifar.folder}/{file}" for file in cifar.files])
    return _read_batches(cifar, lambda file: members[f"{cifar.folder}/{file}"], archive)


def stack_images(pixels: Sequence[np.ndarray], labels: Sequence[int] | np.ndarray) -> Images:
    """One set of several arrays uint8 [N, C, H, W] and all their labels."""
    return Images(torch.from_numpy(np.concatenate(pixels)), torch.from_numpy(np.array(labels, dtype=np.int64)))


def whole_set(cifar: Cifar, train: Images, test: Images, origin: Path) -> ImageData:
    """The set with its constants; refused unless it has all the images that it is known to have."""
    try:
        data = ImageData(cifar.name, train, test, cifar.classes, cifar.mean, cifar.std)
    except InputError as error:
        raise InputError(f"{origin} does not hold {cifar.name} ({error}): {_REMEDY}") from error
    found, known = data.sizes, KNOWN_SIZES[cifar.name]
    if found != known:
        raise InputError(
            f"{origin} holds {found.train} training and {found.test} test images of shape {list(found.image)}, but "
            f"{cifar.name} has {known.train} and {known.test} of {list(known.image)}: {_REMEDY}"
        )
    return data


def _read_file(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:
            raise InputError(f"{path} has {size:,} bytes, and no official file more than {_LARGEST_FILE:,}: {_REMEDY}")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from error


def _read_batches(cifar: Cifar, read: Callable[[str], bytes], origin: Path) -> ImageData:
    def images(files: Sequence[str]) -> Images:
        batches = [_read_batch(read(file), cifar.label_key, f"{file} in {origin}") for file in files]
        return stack_images([pixels for pixels, _ in batches], np.concatenate([labels for _, labels in batches]))

    return whole_set(cifar, images(cifar.train_files), images([cifar.test_file]), origin)


def _read_batch(raw: bytes, label_key: str, origin: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 3, 32, 32] and labels [N] of one official file."""
    try:
        batch = unpickle_batch(raw)
        pixels, labels = batch["data"], _numbers(batch[label_key])
        if pixels.dtype != np.uint8 or not np.issubdtype(labels.dtype, np.integer) or len(pixels) != len(labels):
            raise ValueError("its arrays are not those of a CIFAR batch")
        return pixels.reshape(-1, 3, 32, 32), labels
    except Exception as error:
        # A damaged pickle can end in almost any type of exception.
        reason = short(error) or type(error).__name__
        raise InputError(f"{origin} is not a readable CIFAR batch ({reason}): {_REMEDY}") from error


def _numbers(labels: object) -> np.ndarray:
    # A list that contains itself would keep NumPy busy for ever: so the numbers are looked at one by one.
    if isinstance(labels, list) and not all(type(label) is int for label in labels):
        raise ValueError("its labels are not whole numbers")
    return np.asarray(labels)

"""Folders of pictures: a subfolder for each class, JPEG or PNG.

    PATH/train/cat/1.jpg   PATH/test/cat/2.png      both sets
    PATH/cat/1.jpg                                  one set, of which a fraction is for testing
    PATH/clients/0/cat/1.jpg                        a folder for each client, in the place of train

Pictures of different sizes are scaled to one, their shorter side to its length, and cropped in the middle.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

from fsl_sage.config import Config, DataConfig
from fsl_sage.errors import InputError
from fsl_sage.problems.classification import refuse_unlearnt
from fsl_sage.problems.images.images import ImageData, Images
from fsl_sage.problems.images.npz import channel_moments, split_off
from fsl_sage.reading import short

SUFFIXES = (".jpg", ".jpeg", ".png")
_GREY = ("1", "L", "LA")
_COLOUR = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")


class Picture(NamedTuple):
    """A file and its class."""

    file: Path
    label: int
    client: int


def read_folder(path: Path, test_fraction: float, side: int | None) -> ImageData:
    """The pictures in a folder; without a test folder a stratified `test_fraction` of them is the test set.

    Args:
        path: The folder.
        test_fraction: For a folder without a test set.
        side: Pixels a side to which all are brought; None if they have one size already.
    """
    train_folders, test_folder = _layout(path)
    classes = tuple(sorted({each.name for folder in train_folders for each in _subfolders(folder)}))
    if len(classes) < 2:
        raise InputError(f"{path} has {len(classes)} class folders: there must be a folder for each of two classes.")
    pictures = [
        picture for number, folder in enumerate(train_folders) for picture in _pictures(folder, classes, number)
    ]
    tests = [] if test_folder is None else _tests(test_folder, classes)
    size, grey = _common(pictures + tests, side)
    train = _images(pictures, size, grey, side)
    if test_folder is None:
        train, test, kept = split_off(train, test_fraction, path)
        pictures = [pictures[place] for place in kept]
    else:
        test = _images(tests, size, grey, side)
    refuse_unlearnt(train.y, test.y, classes, path)
    return ImageData(f"folder:{path}", train, test, classes, *channel_moments(train), _shares(pictures, train_folders))


def folder_defaults(name: str) -> Config:
    """The defaults for a folder: where the clients have folders of their own, these are the partition."""
    path = Path(name.partition(":")[2]).expanduser()
    if not (path / "clients").is_dir():
        return Config(data=DataConfig(name=name))
    return Config(clients=len(_clients(path)), data=DataConfig(name=name, partition="given"))


def _layout(path: Path) -> tuple[list[Path], Path | None]:
    """The folders with training pictures, one or one for each client, and the one with test pictures."""
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: give the path of one with a subfolder for each class.")
    test = path / "test" if (path / "test").is_dir() else None
    if (path / "clients").is_dir():
        return _clients(path), test
    if (path / "train").is_dir():
        return [path / "train"], test
    if test is not None:
        raise InputError(f"{path} has a folder test and no folder train: give both, or the class folders alone.")
    return [path], None


def _clients(path: Path) -> list[Path]:
    """The clients' folders: clients/0, clients/1 and so on."""
    found = {each.name: each for each in _subfolders(path / "clients")}
    wanted = [str(number) for number in range(len(found))]
    if not found or set(found) != set(wanted):
        raise InputError(
            f"{path / 'clients'} has the folders {short(', '.join(sorted(found))) or 'none'}: number the clients' "
            "folders 0, 1, 2 and so on."
        )
    return [found[name] for name in wanted]


def _subfolders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def _pictures(folder: Path, classes: Sequence[str], client: int = 0) -> list[Picture]:
    """The pictures below a folder, class by class, in the order of their names. A client need not have all classes."""
    found = []
    for each in _subfolders(folder):
        files = sorted(file for file in each.iterdir() if file.is_file() and not file.name.startswith("."))
        if not files:
            raise InputError(f"{each} is empty: put pictures of the class there, or remove the folder.")
        strange = [file for file in files if file.suffix.lower() not in SUFFIXES]
        if strange:
            raise InputError(f"{strange[0]} is not a picture: a class folder holds {', '.join(SUFFIXES)} alone.")
        found += [Picture(file, classes.index(each.name), client) for file in files]
    if not found:
        raise InputError(f"{folder} has no class folders: make a folder for each class.")
    return found


def _tests(folder: Path, classes: tuple[str, ...]) -> list[Picture]:
    unknown = [each for each in _subfolders(folder) if each.name not in classes]
    if unknown:
        raise InputError(
            f"The test set has the class {unknown[0].name} in {unknown[0]}, and no training picture has it: give "
            "training pictures of this class, or leave it out."
        )
    return _pictures(folder, classes)


def _common(pictures: Sequence[Picture], side: int | None) -> tuple[tuple[int, int], bool]:
    """The (width, height) that all will have, and whether all are grey; pictures are only opened, not decoded."""
    with ThreadPoolExecutor() as pool:
        heads = list(pool.map(_head, [picture.file for picture in pictures]))
    sizes = [size for size, _ in heads]
    other = next((place for place, size in enumerate(sizes) if size != sizes[0]), None)
    if side is None and other is not None:
        first, second = pictures[0].file, pictures[other].file
        raise InputError(
            f"{first} has {_times(sizes[0])} pixels and {second} {_times(sizes[other])}: give --data.image-size, the "
            "side of a square to which all are scaled and cropped, such as 64."
        )
    return (side, side) if side is not None else sizes[0], all(grey for _, grey in heads)


def _head(file: Path) -> tuple[tuple[int, int], bool]:
    with _open(file) as picture:
        if picture.mode not in _GREY + _COLOUR:
            raise InputError(f"{file} has pixels of the kind {picture.mode}: save it with 8 bits, or use npz: for it.")
        turned = picture.getexif().get(0x0112, 1) >= 5  # lies on its side
        width, height = picture.size
        return (height, width) if turned else (width, height), picture.mode in _GREY


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _open(file: Path) -> Image.Image:
    try:
        return Image.open(file, formats=("JPEG", "PNG"))
    except Exception as error:  # Pillow reports damage, and pictures that are too large, by several types
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> InputError:
    return InputError(f"{file} is not a readable JPEG or PNG ({short(error, 100)}): replace or remove it.")


def _images(pictures: Sequence[Picture], size: tuple[int, int], grey: bool, side: int | None) -> Images:
    with ThreadPoolExecutor() as pool:
        decode = partial(_decode, size=size, mode="L" if grey else "RGB", scale=side is not None)
        pixels = list(pool.map(decode, [picture.file for picture in pictures]))
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return Images(x, torch.tensor([picture.label for picture in pictures]))


def _decode(file: Path, size: tuple[int, int], mode: str, scale: bool) -> np.ndarray:
    """Pixels uint8 [H, W, C]."""
    with _open(file) as picture:
        try:
            # A camera writes down how it was held; a picture must not lie on its side for that.
            upright = ImageOps.exif_transpose(picture).convert(mode)
            if scale:
                upright = ImageOps.fit(upright, size, Image.Resampling.BILINEAR)
        except Exception as error:
            raise _unreadable(file, error) from None
    pixels = np.asarray(upright)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _shares(pictures: Sequence[Picture], folders: Sequence[Path]) -> tuple[torch.Tensor, ...]:
    """For each client's folder the numbers of its training pictures; empty if there is one folder for all."""
    if folders[0].parent.name != "clients":
        return ()
    clients = torch.tensor([picture.client for picture in pictures])
    return tuple(torch.nonzero(clients == number).flatten() for number in range(len(folders)))

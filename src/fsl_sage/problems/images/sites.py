"""Images that are not all in one place: those of a site, and the test images of the server."""

from pathlib import Path

import torch

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.own_modules import is_own
from fsl_sage.problems.images.folder import read_all
from fsl_sage.problems.images.images import ImageData, Images, ImageTerms
from fsl_sage.problems.images.npz import channel_moments, images_in, names_in, read_arrays
from fsl_sage.problems.images.problem import ImageProblem, load_image_data
from fsl_sage.problems.texts.sources import kind_of_texts


def load_site(path: Path, terms: ImageTerms) -> ImageProblem:
    """A site's training images: an .npz with x and y, or a directory of such files, in the order of their names."""
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"There is no .npz archive in {path}: put the site's images there, as x and y.")
    shares = [_read(file, terms) for file in files]
    if len({share.x.shape[1:] for share in shares}) > 1:
        raise InputError(f"The archives in {path} hold images of several shapes: one shape is needed.")
    images = Images(torch.cat([share.x for share in shares]), torch.cat([share.y for share in shares]))
    return _as_agreed(str(path), images, terms)


def _read(file: Path, terms: ImageTerms) -> Images:
    arrays = read_arrays(file)
    if "classes" in arrays and names_in(arrays, "classes", file) != terms.classes:
        raise InputError(f"The classes in {file} are not those agreed on, or in another order.")
    return images_in(arrays, "x", "y", file)


def load_test_images(config: Config, terms: ImageTerms) -> ImageProblem:
    """The server's problem: the test images of the data set that the configuration names."""
    return _as_agreed(config.data.name, load_server_data(config).test, terms)


def load_unseen_images(config: Config, terms: ImageTerms) -> ImageProblem:
    """Images to try a trained model on: the test images of a set, or all of an archive or folder without any."""
    name = config.data.name
    if is_own(name) or kind_of_texts(name) is not None:
        raise InputError(f"The run has learnt from images, and {name} is something else: give images.")
    kind, _, place = name.partition(":")
    path = Path(place).expanduser()
    if kind == "npz" and "x_test" not in read_arrays(path):
        return _as_agreed(name, _read(path, terms), terms)
    if kind == "folder" and (images := read_all(path, terms.classes, config.data.image_size)) is not None:
        return _as_agreed(name, images, terms)
    data = load_server_data(config)
    if data.classes != terms.classes and not all(name.isdecimal() for name in data.classes):
        raise InputError(f"The classes of {config.data.name} are not those of the run, or in another order.")
    return _as_agreed(config.data.name, data.test, terms)


def _as_agreed(name: str, images: Images, terms: ImageTerms) -> ImageProblem:
    """A problem of one who has only training or only test images, with the classes and normalisation of all.

    The images stand on both sides: a site never asks for a test batch, nor the server for a training batch.
    """
    if tuple(images.x.shape[1:]) != terms.image:
        raise InputError(f"The images in {name} are {list(images.x.shape[1:])}, not {list(terms.image)} as agreed.")
    if kind_of_pixels(images) != terms.pixels:
        raise InputError(f"The images in {name} are {kind_of_pixels(images)}, not {terms.pixels} as agreed.")
    return ImageProblem(ImageData(name, images, images, terms.classes, terms.mean, terms.std))


def kind_of_pixels(images: Images) -> str:
    """The type of the images, in a word."""
    return str(images.x.dtype).removeprefix("torch.")


def load_server_data(config: Config) -> ImageData:
    """The data set that the configuration names; an .npz may hold x_test and y_test alone."""
    path = Path(config.data.name.removeprefix("npz:")).expanduser()
    if config.data.name.startswith("npz:") and "x" not in (arrays := read_arrays(path)):
        test = images_in(arrays, "x_test", "y_test", path)
        if "classes" not in arrays:
            raise InputError(f"{path} has test images alone: name their classes in 'classes'.")
        classes = names_in(arrays, "classes", path)
        return ImageData(config.data.name, test, test, classes, *channel_moments(test))
    return load_image_data(config)

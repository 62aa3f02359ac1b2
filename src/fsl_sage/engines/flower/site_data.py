"""The images of a site, and the test images of the server, in the project's archives."""

from pathlib import Path

import torch

from fsl_sage.config import Config
from fsl_sage.engines.flower.agreement import Agreement
from fsl_sage.engines.setup import load_image_data
from fsl_sage.errors import InputError
from fsl_sage.problems.images.images import ImageData, Images
from fsl_sage.problems.images.npz import channel_moments, images_in, read_arrays
from fsl_sage.problems.texts.texts import KNOWN_TEXTS


def load_site(path: Path, client: int, agreement: Agreement) -> ImageData:
    """A site's training images: an .npz with x and y, or a directory of such files, in the order of their names."""
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"There is no .npz archive in {path}: put the site's images there, as x and y.")
    shares = [_read(file, agreement) for file in files]
    if len({share.x.shape[1:] for share in shares}) > 1:
        raise InputError(f"The archives in {path} hold images of several shapes: one shape is needed.")
    images = Images(torch.cat([share.x for share in shares]), torch.cat([share.y for share in shares]))
    if len(images) != agreement.examples[client]:
        raise InputError(
            f"Client {client} has {len(images)} images here but {agreement.examples[client]} in the agreement: "
            "correct 'examples' in the app's config.json, or the site's data."
        )
    return as_agreed(str(path), images, agreement)


def _read(file: Path, agreement: Agreement) -> Images:
    arrays = read_arrays(file)
    if "classes" in arrays and tuple(arrays["classes"].astype(str).tolist()) != agreement.classes:
        raise InputError(f"The classes in {file} are not those of the agreement, or in another order.")
    return images_in(arrays, "x", "y", file)


def as_agreed(name: str, images: Images, agreement: Agreement) -> ImageData:
    """Images with the agreement's classes and normalisation, for one who has only training or only test images.

    They stand on both sides: a site never asks for a test batch, nor the server for a training batch.
    """
    if tuple(images.x.shape[1:]) != agreement.image:
        raise InputError(f"The images in {name} are {list(images.x.shape[1:])}, not {list(agreement.image)} as agreed.")
    return ImageData(name, images, images, agreement.classes, agreement.mean, agreement.std)


def load_server_data(config: Config) -> ImageData:
    """The data set that the configuration names; an .npz may hold x_test and y_test alone."""
    if config.data.name in KNOWN_TEXTS:
        raise InputError(
            f"--data.name {config.data.name} cannot run on Flower, whose sites hold images: give --engine local or ray."
        )
    path = Path(config.data.name.removeprefix("npz:")).expanduser()
    if config.data.name.startswith("npz:") and "x" not in (arrays := read_arrays(path)):
        test = images_in(arrays, "x_test", "y_test", path)
        if "classes" not in arrays:
            raise InputError(f"{path} has test images alone: name their classes in 'classes'.")
        classes = tuple(arrays["classes"].astype(str).tolist())
        return ImageData(config.data.name, test, test, classes, *channel_moments(test))
    return load_image_data(config)

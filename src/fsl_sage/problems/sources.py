"""What can be fetched ahead of time, by `fsl-sage data get NAME`."""

from pathlib import Path

from fsl_sage.config.directories import data_directory
from fsl_sage.errors import InputError
from fsl_sage.models.language import SMOLLM2
from fsl_sage.problems.download import stored
from fsl_sage.problems.images.sources import UnknownSetError, fetch_images
from fsl_sage.problems.texts.smollm2 import find_smollm2, obtain_smollm2


def fetch(name: str, directory: Path | None = None) -> Path:
    """Make sure that a set, or a model, is on this machine and say where: what is there is not fetched again."""
    if name == SMOLLM2:
        directory = data_directory(directory)
        return find_smollm2(directory) or stored(name, directory, obtain_smollm2)
    try:
        return fetch_images(name, directory)
    except UnknownSetError as error:
        raise InputError(f"{error} {SMOLLM2} is a language model to fetch.") from None

"""What can be fetched ahead of time, by `fsl-sage data get NAME`."""

from pathlib import Path

from fsl_sage.config.directories import data_directory
from fsl_sage.errors import InputError
from fsl_sage.models.language import MINILM, SMOLLM2
from fsl_sage.problems.download import stored
from fsl_sage.problems.images.sources import UnknownSetError, fetch_images
from fsl_sage.problems.texts.imdb import IMDB
from fsl_sage.problems.texts.minilm import find_minilm, obtain_minilm
from fsl_sage.problems.texts.smollm2 import find_smollm2, obtain_smollm2
from fsl_sage.problems.texts.sources import fetch_imdb

MODELS = {SMOLLM2: (find_smollm2, obtain_smollm2), MINILM: (find_minilm, obtain_minilm)}
"""Pretrained models by name: how to find one in the data directory, and how to put it there."""


def fetch(name: str, directory: Path | None = None) -> Path:
    """Make sure that a set, or a model, is on this machine and say where: what is there is not fetched again."""
    if name in MODELS:
        directory = data_directory(directory)
        find, obtain = MODELS[name]
        return find(directory) or stored(name, directory, obtain)
    if name == IMDB:
        return fetch_imdb(directory)
    try:
        return fetch_images(name, directory)
    except UnknownSetError as error:
        raise InputError(f"{error} {' and '.join(MODELS)} are models to fetch.") from None

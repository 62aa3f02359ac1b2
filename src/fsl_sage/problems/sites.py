"""Data that are not all in one place: what server and sites must agree on, and what each of them has.

Only here is asked what kind of data it is: images, texts, or a problem of the user's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.models import check_model_name
from fsl_sage.own_modules import is_own
from fsl_sage.problems.base import Problem
from fsl_sage.problems.images.images import ImageTerms
from fsl_sage.problems.images.problem import ImageProblem, image_shapes
from fsl_sage.problems.images.sites import kind_of_pixels, load_server_data, load_site, load_test_images
from fsl_sage.problems.make import make_problem
from fsl_sage.problems.texts.sites import (
    TextTerms,
    agree_on_texts,
    load_server_texts,
    load_site_texts,
    text_shapes,
    write_texts,
)
from fsl_sage.problems.texts.sources import kind_of_texts


@dataclass(frozen=True)
class Terms(ImageTerms):
    """What server and sites must see in the same way. Of images and texts only one is said."""

    texts: TextTerms = field(default_factory=TextTerms)
    own: bool = False
    """Whether it is a problem of the user's own, which knows for itself."""

    def check(self) -> None:
        """Refuse what is not complete."""
        if self.own:
            return
        if self.texts.kind:
            self.texts.check(self.classes)
            return
        if len(self.image) != 3 or not len(self.mean) == len(self.std) == self.image[0]:
            raise InputError("The agreement needs an image's channels, height and width, and mean and std by channel.")
        if len(self.classes) < 2:
            raise InputError("The agreement needs the names of at least two classes.")


Shares = Sequence[Any]
"""For each client its part of a data set, to be written down by `write_shares`."""


def agree_on(config: Config, *, at_sites: bool) -> tuple[Terms, Shares]:
    """The terms for the data that the configuration names, and the clients' shares of it.

    With `at_sites` the training examples are at the sites, and there are no shares.
    """
    check_model_name(config.model.name)
    if is_own(config.data.name):
        if not at_sites:
            raise InputError(
                f"--data.name {config.data.name} is a problem of your own, whose data the sites hold: give --examples, "
                "the number of training examples of each site."
            )
        return Terms(own=True), []
    if kind_of_texts(config.data.name) is not None:
        texts, classes, rows = agree_on_texts(config, at_sites=at_sites)
        return Terms(classes=classes, texts=texts), rows
    data = load_server_data(config)
    shares = [] if at_sites else [data.train.subset(indices) for indices in ImageProblem(data).divide(config)]
    return Terms(data.sizes.image, data.classes, data.mean, data.std, kind_of_pixels(data.train)), shares


def write_shares(directory: Path, shares: Shares, terms: Terms) -> list[Path]:
    """The examples of each client in a file of its own, as a site would have them."""
    directory.mkdir(parents=True, exist_ok=True)
    if terms.texts.kind:
        return write_texts(directory, terms.texts.kind, shares)
    paths = [directory / f"client-{client}.npz" for client in range(len(shares))]
    for path, share in zip(paths, shares, strict=True):
        np.savez(path, x=share.x.numpy(), y=share.y.numpy(), classes=np.array(terms.classes))
    return paths


def problem_at_site(path: Path, config: Config, terms: Terms, tokenizer: Path | None) -> Problem:
    """A site's own training examples. A problem of the user's own finds them in `config.data.dir`."""
    if terms.own:
        return make_problem(replace(config, data=replace(config.data, dir=path)))
    if terms.texts.kind:
        return load_site_texts(path, config, terms.texts, terms.classes, tokenizer)
    return load_site(path, terms)


def problem_at_server(config: Config, terms: Terms) -> Problem:
    """The server's own test examples."""
    if terms.own:
        return make_problem(config)
    if terms.texts.kind:
        return load_server_texts(config, terms.texts, terms.classes)
    return load_test_images(config, terms)


def shapes_at_sites(problem: Problem, terms: Terms, examples: int) -> Problem:
    """What the server knows of the sites' examples: their shapes, or for texts how large they can be."""
    if terms.own:
        return problem
    if terms.texts.kind:
        return text_shapes(terms.texts, examples, terms.classes)
    return image_shapes(terms.sizes(examples))

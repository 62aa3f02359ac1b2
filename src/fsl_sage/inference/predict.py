"""The classes of image files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsl_sage.errors import InputError
from fsl_sage.inference.pictures import picture_files, read_picture
from fsl_sage.inference.trained import Trained, load_trained
from fsl_sage.problems.classification import logits_of

BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """What a model says of a file."""

    file: Path
    classes: tuple[str, ...]
    """The most likely classes, in order."""
    probabilities: tuple[float, ...]
    """How likely each of them is, 0 to 1."""


def predict(
    run: Path | str | Trained, files: Path | str | Sequence[Path | str], *, top: int = 1, best: bool = False
) -> list[Prediction]:
    """The classes of images.

    Args:
        run: The directory of a run on images, or its model, as `load_trained` gives it.
        files: An image file or a folder of them, or several. They are scaled to the size of the training images.
        top: How many of the most likely classes to name.
        best: Take the model of the best round instead of the last one's.

    Returns:
        For each image its file, the `top` most likely classes, and their probabilities.
    """
    if top < 1:
        raise InputError(f"--top {top} is not possible: name at least one class.")
    trained = run if isinstance(run, Trained) else load_trained(run, best=best)
    terms = trained.terms
    if terms is None:
        raise InputError(
            f"{trained.directory} is a run on {trained.config.data.name}, not on images: load its model by "
            "fsl_sage.load_model, and if it writes texts, see 'fsl-sage samples'."
        )
    if terms.pixels != "uint8":
        raise InputError(
            f"{trained.directory} was trained on images of {terms.pixels}, whose scale a picture file does not tell: "
            "load its model by fsl_sage.load_model."
        )
    found = picture_files(_paths(files))
    predictions = []
    for start in range(0, len(found), BATCH):
        share = found[start : start + BATCH]
        images = torch.stack([read_picture(file, terms) for file in share])
        predictions += _predict(trained, share, terms.normalise(images), min(top, len(terms.classes)))
    return predictions


def _paths(files: Path | str | Sequence[Path | str]) -> list[Path]:
    """The paths that are given; a text is one path and not a row of letters."""
    each = [files] if isinstance(files, str | Path) else files
    if not isinstance(each, Sequence) or not all(isinstance(file, str | Path) for file in each):
        raise InputError(
            f"predict takes the paths of image files, not a {type(files).__name__}: for tensors call "
            "the model that fsl_sage.load_model gives."
        )
    return [Path(file).expanduser() for file in each]


@torch.no_grad()
def _predict(trained: Trained, files: Sequence[Path], images: torch.Tensor, top: int) -> list[Prediction]:
    assert trained.terms is not None
    dtype = next((p.dtype for p in trained.model.parameters()), torch.float32)
    likely = logits_of(trained.model(images.to(dtype))).softmax(1).topk(top)
    if not likely.values.isfinite().all():
        raise InputError(f"The model in {trained.directory} gives no numbers: its weights or its moments are damaged.")
    names = trained.terms.classes
    return [
        Prediction(file, tuple(names[label] for label in labels), tuple(values))
        for file, labels, values in zip(files, likely.indices.tolist(), likely.values.tolist(), strict=True)
    ]

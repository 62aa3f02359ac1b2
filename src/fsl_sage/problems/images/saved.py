"""Images in a directory of the package `datasets`: a column of images and one of labels."""

from pathlib import Path
from typing import Any

from fsl_sage.errors import InputError
from fsl_sage.problems.classification import refuse_unlearnt
from fsl_sage.problems.images.images import ImageData
from fsl_sage.problems.images.npz import channel_moments, numbered, split_off
from fsl_sage.problems.images.pictures import Picture, common_form, decode
from fsl_sage.problems.saved import LABEL, Saved, open_saved


def read_saved_images(path: Path, test_fraction: float, side: int | None) -> ImageData:
    """The images, as JPEG or PNG; without a test set a stratified `test_fraction` of them is for testing."""
    saved = open_saved(path)
    pictures = _pictures(saved, saved.train, "train")
    tests = [] if saved.test is None else _pictures(saved, saved.test, "test")
    classes = saved.label_names or numbered({picture.label for picture in pictures}, path)
    for picture in [*pictures, *tests]:
        if not 0 <= picture.label < len(classes):
            raise InputError(
                f"The label in {picture.place} is {picture.label}, out of range: number the {len(classes)} classes "
                f"0 to {len(classes) - 1}."
            )
    form = common_form(pictures + tests, side)
    train = decode(pictures, form)
    if saved.test is None:
        train, test, _ = split_off(train, test_fraction, path)
    else:
        test = decode(tests, form)
    refuse_unlearnt(train.y, test.y, classes, path)
    return ImageData(f"datasets:{path}", train, test, classes, *channel_moments(train))


def _pictures(saved: Saved, table: Any, split: str) -> list[Picture]:
    """The rows of a table, undecoded."""
    from datasets import Image

    column = saved.image_column
    rows = table.cast_column(column, Image(decode=False))
    found = []
    for number, row in enumerate(rows):
        place, image, label = saved.place(split, number), row[column], row[LABEL]
        if image is None or not isinstance(label, int):
            raise InputError(f"{place} has no image or no label: remove it.")
        content = image["bytes"] if image["bytes"] is not None else Path(image["path"])
        found.append(Picture(content, label, place))
    if not found:
        raise InputError(f"{split} in {saved.path} is empty.")
    return found

"""Directories that the package `datasets` of Hugging Face has saved by `save_to_disk`: opened, nothing of them run."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsl_sage.errors import InputError
from fsl_sage.reading import short

IMAGE, LABEL = ("image", "img"), "label"


@dataclass(frozen=True, eq=False)
class Saved:
    """A training set and perhaps a test set, tables of `datasets`."""

    path: Path
    train: Any
    test: Any | None

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.train.column_names)

    @property
    def image_column(self) -> str | None:
        """The column of the images, if there is one besides the labels."""
        return next((name for name in IMAGE if name in self.columns and LABEL in self.columns), None)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, where the table knows them."""
        return tuple(getattr(self.train.features.get(LABEL), "names", None) or ())

    def place(self, split: str, row: int) -> str:
        """What a row is called in errors."""
        return f"row {row} of {split} in {self.path}"


@lru_cache(maxsize=1)
def open_saved(path: Path) -> Saved:
    """The directory's tables, which stay on the disk."""
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise InputError(f"--data.name datasets:{path} needs the package datasets: pip install datasets") from None
    try:
        found: Any = load_from_disk(str(path))
    except Exception as error:  # whatever its readers stumble over
        raise InputError(f"{path} is not a directory that datasets has saved: {short(error)}.") from None
    if isinstance(found, Dataset):
        return Saved(path, found, None)
    if "train" not in found:
        raise InputError(f"{path} has {', '.join(found) or 'no splits'}: it must have train, and may have test.")
    train, test = found["train"], found.get("test")
    if test is not None and test.column_names != train.column_names:
        raise InputError(f"test in {path} has the columns {', '.join(test.column_names)}, and train has others.")
    return Saved(path, train, test)

"""The file of a figure."""

import os
from pathlib import Path

from fsl_sage.errors import InputError


def check_figure(file: Path | None) -> None:
    """Refuse a file that cannot become a figure, before the work that it is to show."""
    if file is None:
        return
    if file.suffix.lower() != ".png" or file.is_dir():
        raise InputError(
            f"--figure {file} is not possible: give a PNG file, as in --figure {file.with_suffix('.png')}."
        )
    if not file.parent.is_dir():
        raise InputError(f"--figure {file} cannot be written: there is no directory {file.parent}. Make it first.")
    if not os.access(file.parent, os.W_OK):
        raise InputError(f"--figure {file} cannot be written: {file.parent} is read-only. Give another place.")

"""Where data sets and models are kept on this machine."""

import os
from pathlib import Path


def data_directory(directory: Path | None = None) -> Path:
    """The directory that was asked for, else $FSL_SAGE_DATA, else fsl-sage in the user's cache directory."""
    if directory is None and (chosen := os.environ.get("FSL_SAGE_DATA")):
        directory = Path(chosen)
    if directory is None:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fsl-sage"
    return directory.expanduser()

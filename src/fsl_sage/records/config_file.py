"""config.json: what a run was told, by which versions, and what it is judged by."""

import platform
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import torch

from fsl_sage.errors import InputError, RunWarning
from fsl_sage.own_modules import KINDS, is_own
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.reading import read_json


def read_config_file(file: Path) -> dict[str, Any]:
    """All that the config.json of a run says."""
    try:
        written = read_json(file)
    except FileNotFoundError:
        missing = "there is no config.json in it" if file.parent.is_dir() else "there is no such folder"
        raise InputError(f"{file.parent} holds no run: {missing}.") from None
    except NotADirectoryError:
        raise InputError(f"{file.parent} is a file: give the directory of a run.") from None
    except InputError:
        written = None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None
    if not isinstance(written, dict) or not isinstance(written.get("config"), dict):
        raise InputError(f"{file} is damaged: it is not a run's configuration.")
    return written


def warn_of_versions(file: Path) -> None:
    """Warn if the run of this config.json began with other software than is here now."""
    began, now = read_config_file(file).get("versions"), versions()["versions"]
    for name in ("fsl-sage", "torch"):
        if isinstance(began, dict) and began.get(name, now[name]) != now[name]:
            warn(
                f"{file.parent} began with {name} {began[name]}, and continues with {now[name]}: its bits may differ "
                "from those of a run that one version has played.",
                RunWarning,
                stacklevel=4,
            )


def score_in(written: Mapping[str, Any]) -> Score:
    """The headline score in the contents of config.json; the test accuracy for runs of older versions."""
    try:
        return Score(**written["score"]) if "score" in written else ACCURACY
    except TypeError:
        raise InputError("The score in config.json is damaged: it is not a run's configuration.") from None


def leads_nowhere(name: str) -> bool:
    """Whether a name has a relative path, or a module, that is not found from the current folder."""
    kind, colon, place = name.partition(":")
    if is_own(name):
        return not (Path(*kind.split(".")).with_suffix(".py").exists() or kind.partition(".")[0] in sys.modules)
    path = Path(place).expanduser()
    return bool(colon) and kind in KINDS[:-1] and not path.is_absolute() and not path.exists()


def versions() -> dict[str, Any]:
    """The versions, the machine and the time with which a run starts."""
    return {
        "versions": {
            "fsl-sage": version("fsl-sage"),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }

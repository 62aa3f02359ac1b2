"""Code of the user's own, named by MODULE:NAME: an algorithm, a problem, a model, an augmentation."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from fsl_sage.errors import InputError, described, nearest

KINDS = ("npz", "folder", "jsonl", "datasets", "hf")
"""What stands before a colon and names no module: files of these kinds, and models of transformers."""


_OF_A_RUN = ("metrics.jsonl", "inference.json", "model.safetensors", "checkpoint.safetensors")


def is_own(name: str | None) -> bool:
    """Whether a name says MODULE:NAME."""
    module, colon, attribute = (name or "").partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return bool(colon) and module not in KINDS and all(part.isidentifier() for part in parts)


def import_own(name: str, option: str) -> Any:
    """What MODULE:NAME names. The modules of the current folder are found, too.

    Args:
        name: Such as `mine:Housing`.
        option: The option that it was given by, for errors.
    """
    module, _, attribute = name.partition(":")
    if module.startswith(".") or module.endswith(".py"):
        own = Path(module).stem
        raise InputError(f"{option} {name} is a file: give {own}:{attribute}, and {own}.py is found in this folder.")
    find_modules_in()
    _refuse_others(name, module.partition(".")[0], option)
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{option} {name} cannot be imported: {error}.") from None
    except Exception as error:  # whatever the user's module does when it is imported
        raise InputError(f"{option} {name} cannot be imported: {described(error)}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"{option} {name} is not there: {module} has no {part}{_nearest(part, found)}")
        found = getattr(found, part)
    return found


def _nearest(part: str, holder: Any) -> str:
    """The end of the sentence: which of the classes and functions that stand there was meant."""
    there, place = getattr(holder, "__dict__", {}), getattr(holder, "__name__", "")
    own = [name for name, value in there.items() if getattr(value, "__module__", None) == place]
    return nearest(part, own, "; it has") if own else "."


def _refuse_others(name: str, top: str, option: str) -> None:
    """A run directory names modules, and it may come from somebody else: neither Python's own functions are called for
    it, nor is code run that lies in such a directory.
    """
    if top in sys.stdlib_module_names:
        raise InputError(f"{option} {name} is a part of Python: name a module of your own.")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, AttributeError, ValueError):
        return
    places = [*Path(spec.origin).parents][:2] if spec is not None and spec.origin else []
    if any((place / "config.json").exists() and any((place / file).exists() for file in _OF_A_RUN) for place in places):
        raise InputError(f"{option} {name} lies in a run directory ({places[0]}), whose code is never run.")


def find_modules_in(folder: Path | None = None) -> None:
    """Let the modules of a folder be imported, as `python -m` does with those of the current one."""
    place = os.getcwd() if folder is None else str(folder.resolve())
    if place not in map(os.path.abspath, sys.path):
        sys.path.insert(0, place)

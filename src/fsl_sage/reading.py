"""Small files that others have written: their size is looked at before they are read, their nesting bounded."""

import json
import tomllib
from pathlib import Path
from typing import Any

from fsl_sage.errors import InputError

LARGEST_TOML = 2**16
"""Bytes. A preset has a few hundred."""
LONGEST_LINE = 4000
"""Letters of TOML: for a key of n parts (a.a.a.a) the parser takes time with the square of n."""
LARGEST_JSON = 2**24
UTF_8 = "utf-8-sig"
"""How texts of others are read: UTF-8, with a byte order mark or without."""


def read_text(path: Path, most: int) -> str:
    """The text of a file; an OSError if it cannot be read, an InputError if it is too large or no text.

    A byte order mark before it, as some editors write, is no part of it.
    """
    with open(path, "rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise InputError(f"{path} is too large: such a file has at most {most:,} bytes.")
    try:
        return raw.decode(UTF_8)
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text in UTF-8.") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file; an OSError if it cannot be read, an InputError if it is none."""
    text = read_text(path, LARGEST_TOML)
    if any(len(line) > LONGEST_LINE for line in text.split("\n")):
        raise InputError(f"{path} has a line of more than {LONGEST_LINE:,} letters: write it in several.")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} cannot be read as TOML: {short(error)}.") from None
    except (RecursionError, ValueError):  # nested too deep, or a number of too many digits
        raise InputError(f"{path} cannot be read as TOML: it is nested too deep, or has too long a number.") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file; an OSError if it cannot be read, an InputError if it is none."""
    try:
        return json.loads(read_text(path, LARGEST_JSON))
    except InputError:
        raise
    except (RecursionError, ValueError):
        raise InputError(f"{path} cannot be read as JSON.") from None


def short(what: object, longest: int = 200) -> str:
    """What a file holds, fit for a sentence."""
    text = str(what)
    return text if len(text) <= longest else text[: longest - 3] + "..."

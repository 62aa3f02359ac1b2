"""The tables of a run that are by class: which client holds what, and how well each class is recognised."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsl_sage.records.files import as_csv, readable, write_bytes


def write_classes(file: Path, counts: np.ndarray, classes: Sequence[str]) -> None:
    """Write how many examples of each class each client holds.

    Args:
        file: classes.csv.
        counts: [clients, classes].
        classes: Their names.
    """
    rows = ([client, *map(int, row)] for client, row in enumerate(counts))
    write_bytes(file, as_csv([["client", *classes], *rows]).encode())


def read_classes(file: Path) -> tuple[np.ndarray, list[str]]:
    """The counts [clients, classes] and the names that `write_classes` wrote."""
    with readable(file), open(file, newline="", encoding="utf-8") as lines:
        header, *rows = csv.reader(lines)
        return np.array([[int(count) for count in row[1:]] for row in rows], dtype=np.int64), header[1:]


def write_by_class(file: Path, metrics: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Write the metrics that are by class (`test_class_…`), a line for each class; an unknown value is left empty."""
    mark = "test_class_"
    columns = {name.replace(mark, "test_"): values for name, values in metrics.items() if name.startswith(mark)}
    if columns and classes:
        rows = zip(range(len(classes)), classes, *columns.values(), strict=True)
        write_bytes(file, as_csv([["label", "class", *columns], *rows]).encode())

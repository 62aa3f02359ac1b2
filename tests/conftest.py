"""Small runs for tests: real images, a small model, seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from fsl_sage.algorithms import resolve
from fsl_sage.config import Config, from_dict, from_file
from fsl_sage.records import figures
from fsl_sage.report import panels

TINY: dict[str, Any] = {
    "clients": 3,
    "rounds": 2,
    "batch_size": 16,
    "upload_every": 2,
    "align_every": 1,
    "workers": 2,
    "device": "cpu",
    "data": {"train_images": 150, "test_images": 100},
    "model": {"name": "small-cnn"},
    "alignment": {"samples": 48, "steps": 4},
}


def merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        merged[key] = merge(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def tiny_config(changes: dict[str, Any]) -> Config:
    return resolve(from_file(from_dict(merge(TINY, changes), Config()), "tests", of_several=True))


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """Makes a tiny configuration with changes; `out` is a fresh directory.

    Options that its algorithm does not have are left out.
    """
    made = 0

    def make(**changes: Any) -> Config:
        nonlocal made
        made += 1
        return tiny_config({"out": str(tmp_path / f"run{made}"), **changes})

    return make


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and reports in this process compose their figures, and leave out what takes matplotlib longer than a tiny
    run trains: to draw them. It does for tests marked `drawn`, and in every process of its own."""
    if not request.node.get_closest_marker("drawn"):
        monkeypatch.setattr(figures, "_save", _save_undrawn)
        monkeypatch.setattr(panels, "_drawn", lambda figure, kind: b"not drawn")


def _save_undrawn(figure: Figure, path: Path) -> None:
    figures.write_bytes(path, b"not drawn")

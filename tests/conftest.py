"""Small runs for tests: real images, a small model, seconds."""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from matplotlib.figure import Figure
from torch import nn

from fsl_sage.algorithms import resolve
from fsl_sage.compare import placement
from fsl_sage.config import Config, from_dict, from_file
from fsl_sage.experiment import run, setup
from fsl_sage.problems.base import Problem
from fsl_sage.problems.images.problem import ImageProblem
from fsl_sage.problems.parts import META, build_parts
from fsl_sage.records import figures
from fsl_sage.report import panels
from tests.processes import ForkedRun

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

TINY: dict[str, Any] = {
    "clients": 3,
    "rounds": 2,
    "batch_size": 16,
    "upload_every": 2,
    "align_every": 1,
    "workers": 2,
    "checkpoint_every": 1,  # else it depends on the time that they take
    "device": "cpu",
    "data": {"train_images": 150, "test_images": 100},
    "model": {"name": "small-cnn"},
    "alignment": {"samples": 48, "steps": 4, "batch_size": 16},
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


@pytest.fixture(scope="session")
def finished_runs() -> dict[str, Path]:
    """The directories of `finished`."""
    return {}


@pytest.fixture
def finished(finished_runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a tiny run with changes, made when the first test asks for it. Nobody may write into it."""

    def made(**changes: Any) -> Path:
        key = repr(sorted(changes.items()))
        if key not in finished_runs:
            out = tmp_path_factory.mktemp("finished") / "run"
            finished_runs[key] = run(tiny_config({"out": str(out), **changes})).directory
        return finished_runs[key]

    return made


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a comparison have processes that need not import torch; see tests/processes.py."""
    monkeypatch.setattr(placement, "start_process", ForkedRun)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def unsynced() -> Iterator[None]:
    """Runs in this process do not wait until their files are on the disk: no test cuts the power. A run of two rounds
    calls fsync 28 times, and a call may wait for the disk longer than a step trains. In other processes they wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs and reports in this process compose their figures, and leave out what takes matplotlib longer than a tiny
    run trains: to draw them. It does for tests marked `drawn`, and in every process of its own. Bars of the same
    classes and as many clients are composed once: only their lengths would differ."""
    with pytest.MonkeyPatch.context() as patch:  # not the test's own, which a test may undo
        if not request.node.get_closest_marker("drawn"):
            patch.setattr(figures, "_save", _save_undrawn)
            patch.setattr(figures, "classes_figure", _classes_composed_once)
            patch.setattr(panels, "_drawn", lambda figure, kind: b"not drawn")
        yield


def _save_undrawn(figure: Figure, path: Path) -> None:
    figures.write_bytes(path, b"not drawn")


_classes_figure = figures.classes_figure
_COMPOSED: set[object] = set()


def _classes_composed_once(path: Path, counts: np.ndarray, classes: Sequence[str], config: Config) -> None:
    key = (counts.shape, *classes)
    if key in _COMPOSED:
        figures.write_bytes(path, b"not composed")
        return
    _classes_figure(path, counts, classes, config)
    _COMPOSED.add(key)


SMALL_MODELS = ("small-cnn", "tests.oracles.subject:TinyResNet")
_PARTS: dict[object, dict[str, nn.Module]] = {}


@pytest.fixture(autouse=True)
def parts_cut_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs of a small model get deep copies of parts that were built and cut once. For tests marked `cut_anew` every
    run builds and cuts its own, as it does in every process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("cut_anew"):
            patch.setattr(setup, "build_parts", _copied_parts)
        yield


def _copied_parts(
    config: Config, problem: Problem, device: torch.device, *, needs_auxiliary: bool
) -> dict[str, nn.Module]:
    if device == META or not isinstance(problem, ImageProblem) or config.model.name not in SMALL_MODELS:
        return build_parts(config, problem, device, needs_auxiliary=needs_auxiliary)
    sizes = problem.sizes
    kinds = (sizes.classes, sizes.image, config.alignment.loss, needs_auxiliary)
    key = (config.model, config.seed, config.precision, device, *kinds)  # all that they depend on
    if key not in _PARTS:
        _PARTS[key] = build_parts(config, problem, device, needs_auxiliary=needs_auxiliary)
    return copy.deepcopy(_PARTS[key])

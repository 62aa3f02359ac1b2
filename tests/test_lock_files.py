"""What `make run` and `make test` install: the versions of constraints.txt, each with hashes, and no place of files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD_TOOLS = {"setuptools", "wheel", "httpx2-jsfetch"}
"""Not in constraints.txt: tools that build the package, and what only a browser needs."""


def pins(file: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


@pytest.mark.parametrize("file", ["requirements.lock", "requirements-test.lock"])
def test_a_lock_has_the_versions_of_the_constraints_with_hashes(file):
    locked, constrained = pins(file), pins("constraints.txt")
    assert {name: version for name, version in locked.items() if constrained.get(name) != version}.keys() <= BUILD_TOOLS
    assert "setuptools" in locked
    assert "torch" not in locked
    entries = re.split(r"\n(?=[a-z])", (ROOT / file).read_text().split("\n\n")[-1])
    entries = [entry for entry in entries if not entry.startswith("#")]
    assert all("--hash=sha256:" in entry for entry in entries)
    assert len(entries) >= len(locked) - 1


def test_the_test_lock_holds_the_other():
    assert pins("requirements.lock").items() <= pins("requirements-test.lock").items()


@pytest.mark.parametrize("file", ["requirements.lock", "requirements-test.lock", "constraints.txt"])
def test_a_lock_names_no_place(file):
    assert not re.search(r"://|index-url|find-links|@ |file:", (ROOT / file).read_text())

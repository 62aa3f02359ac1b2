"""The first hour, played with the wheel in a folder outside of the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The package from its wheel, in a folder of its own. A build leaves files in the sources, so they are copied."""
    there = tmp_path_factory.mktemp("newcomer")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, there)
    shutil.copytree(ROOT / "src", there / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", "."]
    subprocess.run(build, cwd=there, check=True)
    (wheel,) = (there / "wheels").glob("*.whl")
    target = there / "site"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", target, wheel], check=True)
    return target


@pytest.mark.slow
def test_the_first_hour(installed: Path, tmp_path: Path) -> None:
    script = shutil.copy(Path(__file__).with_name("hour.py"), tmp_path)
    clean = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("The hour is over: everything worked.\n")
    code = "import fsl_sage; print(fsl_sage.__file__)"
    where = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=clean, capture_output=True, text=True).stdout
    assert where.startswith(str(installed))

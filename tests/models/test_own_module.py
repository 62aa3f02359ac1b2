"""MODULE:FACTORY finds modules of the current folder, as MODULE:CLASS of an algorithm does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NET = """
from torch import nn

def make(classes, channels):
    return nn.Sequential(nn.Conv2d(channels, 4, 8, 8), nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
"""


@pytest.mark.slow
def test_a_model_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine_own_net.py").write_text(NET)
    # As the installed command, whose own folder Python puts in the place of the current one.
    safe = {**os.environ, "PYTHONSAFEPATH": "1"}
    words = ["cost", "--model.name", "mine_own_net:make", "--model.cut", "0", "--model.auxiliary", "full", "--json"]
    code = f"import sys; from fsl_sage.cli import main; assert '' not in sys.path; main({words})"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=safe, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert '"fedavg"' in found.stdout

"""The memory of a client's process at a site, at the size of GPT-2 medium, over TLS. What it rests on is tested in
small: `test_frugal_loss` for the logits, `test_sites` for freed memory and for what a site holds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("peft")


@pytest.mark.long
def test_a_client_takes_little_more_than_its_imports_and_what_is_planned() -> None:
    """The benchmark fails where the peak is more than 1.1 times that."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.site_memory"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peak / together" in done.stdout

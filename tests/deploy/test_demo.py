"""`fsl-sage deploy demo`: a real federation on loopback, and the same run on the local engine."""

import contextlib
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fsl_sage.cli import main
from fsl_sage.deploy import demo

from .prestarted import ForkingFederation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


def test_the_demo_of_the_command_line_compares_bit_for_bit_and_leaves_no_process(tmp_path, monkeypatch, capsys):
    """Its apps' processes are forked; those of examples/federation.py start from nothing."""
    monkeypatch.setattr(demo, "LoopbackFederation", ForkingFederation)
    main(["deploy", "demo", "--keep", str(tmp_path / "demo")])
    said = capsys.readouterr().out
    assert "bit for bit" in " ".join(said.split())
    assert "round 3/3" in said
    deadline = time.monotonic() + 10  # a forked app may be on its way out
    while (left := _processes_with(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def _processes_with(text: str) -> list[str]:
    """The commands of running processes that mention a text."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in commands if text in command]

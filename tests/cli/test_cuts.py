"""The cuts of a model as they are shown."""

import json
from io import StringIO

import pytest
from rich.console import Console

from fsl_sage.cli.cuts import as_json, print_cuts
from fsl_sage.cli.cuts_figure import cuts_figure
from fsl_sage.config import Config, ModelConfig
from fsl_sage.experiment.cuts import Limits, cuts_of

SMALL = Config(model=ModelConfig(name="small-cnn"))


@pytest.fixture(scope="module")
def table():
    return cuts_of(SMALL)


def test_as_plain_data_and_as_a_figure(table, tmp_path):
    assert len(json.loads(json.dumps(as_json(table, Limits(), "fsl-sage")))["cuts"]) == len(table)
    for limits in (Limits(), Limits(client_memory=5e6), Limits(client_memory=1)):
        cuts_figure(tmp_path / "cuts.png", SMALL, table, limits)
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")


def test_no_number_is_cut_off_on_a_narrow_terminal(table):
    console = Console(file=StringIO(), width=40)
    print_cuts(console, SMALL, table, Limits(uplink=1))
    printed = console.file.getvalue()
    assert "…" not in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("block2 ") and "uplink" in line]
    sizes, steps = "block2 19.5 k 78.7 kB 302 kB 16.4 kB", "406 M 151 M 4.68 MB 2.27 MB"
    assert " ".join(line.split()) == f"{sizes} {steps} 0.96 no: uplink"


def test_a_cut_without_an_auxiliary_does_not_fit(table):
    """It needs no memory that is known, and none that is too much."""
    console = Console(file=StringIO(), width=96)
    print_cuts(console, SMALL, table, Limits(client_memory=50e6))
    sizes = console.file.getvalue().split("FLOPs and memory")[0].splitlines()
    ends = {line.split()[0]: line for line in sizes if line.startswith(("block3", "head"))}
    assert ends["block3.conv"].rstrip().endswith("yes")
    assert ends["block3.bn"].rstrip().endswith("no auxiliary")
    assert ends["head.flatten"].rstrip().endswith("no auxiliary")


def test_algorithms_that_move_the_same_bytes_share_a_column(table):
    console = Console(file=StringIO(), width=96)
    print_cuts(console, SMALL, table, Limits())
    bytes_of_a_round = console.file.getvalue().split("auxiliary):\n")[1].splitlines()
    heads, first = bytes_of_a_round[:-1], next(line for line in bytes_of_a_round if line.startswith("block1 "))
    assert any({"fedavg", "splitfed-ss"} <= set(line.split()) for line in heads)
    assert sum(line.split().count("fedprox") for line in heads) == 1
    different = {tuple(row.round_bytes[algorithm] for row in table) for algorithm in table[0].round_bytes}
    assert len(first.split()) == 1 + 2 * len(different)  # a number and its unit
    assert max(map(len, heads)) <= 96

"""The cuts of a model as they are shown."""

import json
from io import StringIO

import pytest
from rich.console import Console

from fsl_sage.cli.cuts import as_json, print_cuts
from fsl_sage.cli.cuts_figure import cuts_figure
from fsl_sage.config import Config, ModelConfig
from fsl_sage.experiment.cuts import Limits, cuts_of, recommend

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
    heads, first = bytes_of_a_round[:-2], next(line for line in bytes_of_a_round if line.startswith("block1 "))
    assert any({"fedavg", "splitfed-ss"} <= set(line.split()) for line in heads)
    assert sum(line.split().count("fedprox") for line in heads) == 1
    different = {tuple(row.round_bytes[algorithm] for row in table) for algorithm in table[0].round_bytes}
    assert len(first.split()) == 1 + 2 * len(different)  # a number and its unit
    assert max(map(len, heads)) <= 96


def test_the_closest_cut_is_the_one_that_exceeds_its_limit_least(table):
    possible = [row for row in table if not row.obstacles(Limits())]
    nearest = min(possible, key=lambda row: row.sent)
    times = f"it needs {nearest.sent / 1e5:.1f} times the limit of uplink."
    assert recommend(table, Limits(uplink=1e5), "fsl-sage").endswith(f"{nearest.point.name} comes closest: {times}")


def test_one_cut_is_spoken_of_as_one(table):
    least = min(row.client.memory for row in table if row.client)
    assert "It is the only cut. The bytes" in recommend(table[:1], Limits(), "fsl-sage")
    fitting = [row for row in table if row.client and row.client.memory == least][:1]
    others = [row for row in table if row.client and row.client.memory > least][:1]
    said = recommend([*fitting, *others], Limits(client_memory=least), "fsl-sage")
    assert "It is the only cut that fits (1 does not). The bytes" in said


def test_algorithms_without_a_column_are_named(table):
    console = Console(file=StringIO(), width=200)
    print_cuts(console, SMALL, table, Limits())
    assert "lazy-fsl-sage moves the bytes of fsl-sage. locfedmix-sl is left out" in console.file.getvalue()


def test_names_in_brackets_are_no_markup(table):
    console = Console(file=StringIO(), width=200)
    print_cuts(console, Config(model=ModelConfig(name="mine:Net[/b]")), table, Limits())
    assert "Cuts of mine:Net[/b]," in console.file.getvalue()

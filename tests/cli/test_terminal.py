"""What a person sees of a run."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from fsl_sage.cli.consoles import Output
from fsl_sage.cli.terminal import Display, print_costs, print_summary
from fsl_sage.config import Config, DataConfig
from fsl_sage.problems.score import Score
from fsl_sage.records.pace import time_left
from fsl_sage.records.run_directory import RunDirectory

ROUND = {
    "round": 1,
    "test_accuracy": 0.254,
    "test_loss": 2.1234,
    "bytes_paper": 2**29,
    "fidelity_cosine": 0.5,
    "fidelity_cosine_seen": None,
    "seconds": 1.26,
    "elapsed_seconds": 4.0,
}

RESULT = {
    "final_loss": 1.0,
    "best_score": 0.5,
    "best_round": 0,
    "final_score": 0.5,
    "elapsed_seconds": 1.0,
    "stopped": "played",
    **dict.fromkeys(("bytes_paper", "bytes_total", "bytes_whole_models"), 1),
}


def shown(terminal):
    out = io.StringIO()
    display = Display(Console(file=out, width=100, height=30, force_terminal=terminal))
    try:
        display.start(Config(rounds=4), Path("runs/a [b]"), [{**ROUND, "round": 0}])
        display.round(ROUND)
        display.finish({})
    finally:
        display.stop()
    return out.getvalue()


def test_a_path_is_no_markup(tmp_path):
    place = tmp_path / "my runs" / "a[/b]"
    out = io.StringIO()
    print_summary(Console(file=out, width=200), place, Config(), RESULT)
    assert str(place / "model.safetensors") in out.getvalue()
    display = Display(Console(file=io.StringIO(), force_terminal=True))
    try:
        display.start(Config(algorithm="mine:A[/b]", data=DataConfig(name="npz:a[/b].npz")), place, [])
    finally:
        display.stop()


def test_a_run_that_starts_again_after_a_loss_has_one_table():
    out = io.StringIO()
    display = Display(Console(file=out, width=100, height=30, force_terminal=True))
    try:
        for done in ([], [{**ROUND, "round": 0}]):
            display.start(Config(rounds=4), Path("runs/a"), done)
            display.round({**ROUND, "round": len(done)})
    finally:
        display.stop()
    assert "going on after" in out.getvalue()
    hidden, shown_again = "\x1b[?25l", "\x1b[?25h"
    assert out.getvalue().count(hidden) == out.getvalue().count(shown_again) == 2  # the first table is down, too


def test_a_file_gets_plain_lines():
    lines = shown(terminal=False).splitlines()
    assert lines[1] == "files in runs/a [b]"
    assert lines[2] == "round 2/4  accuracy 25.4%  loss 2.123  GiB 0.500  fidelity 0.50  time 1.3 s"
    assert len(lines) == 3


def test_a_terminal_gets_a_table_with_the_rounds_before():
    text = shown(terminal=True)
    assert "test accuracy" in text
    assert text.count("25.4%") >= 2
    assert "round 2/4" in text
    assert "runs/a [b]" in text  # a directory's name is no markup


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"rounds": 4}, 4.0),
        ({"rounds": 4, "budget_gib": 0.75}, 2.0),
        ({"rounds": 4, "max_seconds": 5.0}, 1.0),
        ({"rounds": 2}, 0.0),
    ],
)
def test_the_time_left_is_that_of_the_first_stop_rule(options, seconds):
    assert time_left(ROUND, **options) == pytest.approx(seconds)


def test_the_first_round_does_not_count_for_the_pace_when_there_are_others():
    """It took 3 of 4 seconds, and moved a quarter of the bytes."""
    first = {**ROUND, "round": 0, "elapsed_seconds": 3.0, "bytes_paper": 2**27}
    assert time_left(ROUND, 4, first=first) == pytest.approx(2.0)
    assert time_left(ROUND, 4, budget_gib=0.875, first=first) == pytest.approx(1.0)
    assert time_left(first, 4, first=first) == pytest.approx(9.0)


@pytest.mark.parametrize("name", ["folder:photos[old]", "folder:a[/b]", "folder:key"])
def test_the_name_of_data_is_printed_as_it_is(name, capsys):
    print_costs(Output(width=200), COSTS, {}, Config(data=DataConfig(name=name)))
    assert f" on {name}," in capsys.readouterr().out


COSTS = {
    "fedavg": {
        "by_kind": {},
        "is_upper_bound": False,
        "bytes_paper": 1,
        "bytes_whole_models": 1,
        "bytes_total": 1,
        "bytes_first_download": 1,
    }
}


@pytest.mark.parametrize("name", ["R²", "test_accuracy", "area under the curve"])
def test_the_rows_of_a_summary_line_up(name, tmp_path, monkeypatch):
    monkeypatch.setattr(RunDirectory, "score", lambda _: Score(name))
    out = io.StringIO()
    print_summary(Console(file=out, width=200), tmp_path, Config(), RESULT)
    ended, model = (
        next(line for line in out.getvalue().splitlines() if line.startswith(f"  {row} ")) for row in ("ended", "model")
    )
    assert ended.index("played") == model.index(str(tmp_path))

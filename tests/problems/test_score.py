"""The headline score: its words, and which values are good."""

import re
from pathlib import Path

import pytest

from fsl_sage.errors import InputError
from fsl_sage.experiment.round_metrics import row_of
from fsl_sage.problems import ACCURACY, Score
from fsl_sage.problems.score import RECORDED
from fsl_sage.records.run_directory import RunDirectory

ERROR = Score("test_squared_error", higher_is_better=False)


def test_words_and_numbers_for_people():
    assert (ACCURACY.title, ACCURACY.short) == ("test accuracy", "accuracy")
    assert (ERROR.title, ERROR.short) == ("test squared error", "squared error")
    assert [ACCURACY.text(0.2543), ACCURACY.text(0.2543, 2), ACCURACY.text(None)] == ["25.4%", "25.43%", ""]
    assert ERROR.text(12.34567) == "12.35"


def test_the_direction_decides_what_is_best_and_what_is_reached():
    lines = [{"test_accuracy": value, "test_squared_error": value} for value in (0.5, 0.2, 0.7)]
    assert (ACCURACY.best([0.5, 0.2, 0.7]), ERROR.best([0.5, 0.2, 0.7])) == (0.7, 0.2)
    assert (ACCURACY.best_of(lines), ERROR.best_of(lines)) == (lines[2], lines[1])
    assert [ACCURACY.reaches(value, 0.5) for value in (0.4, 0.5, 0.6)] == [False, True, True]
    assert [ERROR.reaches(value, 0.5) for value in (0.4, 0.5, 0.6)] == [True, True, False]


def test_only_a_fraction_has_a_greatest_target():
    ACCURACY.check_target(0.75, "--target")
    ERROR.check_target(75.0, "--target")
    with pytest.raises(InputError, match=r"--target 75 is not possible: give a fraction above 0, at most 1"):
        ACCURACY.check_target(75.0, "--target")


PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_what_every_run_records_is_what_the_page_says_and_what_a_round_has(finished):
    tables = PAGE.read_text().partition("## metrics.jsonl")[2]
    said = {name for line in tables.splitlines() if line.startswith("| `") for name in named(line.split("|")[1])}
    own = {name for name in said if not name.startswith("test_")}
    assert own == {*RECORDED}
    first = RunDirectory(finished()).metrics()[0]
    assert {name for name in first if not name.startswith("test_")} <= own


def named(cell):
    return [name for name in re.findall(r"`([^`]+)`", cell) if not name.endswith("…")]


@pytest.mark.parametrize("name", [*RECORDED, "test_loss_recalibrated", "test_class_f1", "classes", "test_theory"])
def test_a_name_that_a_run_needs_itself_is_refused(name):
    """The score overwrote the bytes, or the training loss, or was overwritten by them."""
    with pytest.raises(InputError, match=r"is not possible: .*under this name\. Give another one, such as test_error"):
        Score(name)


@pytest.mark.parametrize("name", ["m" * 101, "mae\nfoo", " mae", "mae\x00"])
def test_a_name_is_short_and_in_one_line(name):
    with pytest.raises(InputError, match="give a name of at most 100 letters, in one line"):
        Score(name)


def test_no_metric_of_a_task_takes_the_place_of_a_recorded_one():
    assert row_of(3, {"test_error": 1.0}, {"cohort": 2}) == {"round": 3, "test_error": 1.0, "cohort": 2}
    for name in ("cohort", "round", "bytes_paper"):
        with pytest.raises(InputError, match=f"gives a metric called {name}, and every run records another one"):
            row_of(3, {name: 1.0}, {"cohort": 2})

"""The headline score: its words, and which values are good."""

import pytest

from fsl_sage.errors import InputError
from fsl_sage.problems import ACCURACY, Score

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

"""Samples as they are shown."""

import pytest
from rich.console import Console

from fsl_sage.cli.samples import print_samples, print_scores, progress_bar
from fsl_sage.text.samples import Sample, score_samples

LOSSES = {"before": 2.5, "after": 1.25}


@pytest.mark.slow
def test_what_is_shown():
    samples = [Sample("name[A], near[B]", ("one", "two", "three", "four"), "[A] is near B", "")]
    console = Console(record=True, width=100)
    print_samples(console, samples)
    print_scores(console, score_samples(samples), LOSSES)
    shown = console.export_text()
    for text in (
        "name[A], near[B]",
        "one",
        "three",
        "and 1 more",
        "[A] is near B",
        "(nothing)",
        "BLEU",
        "CIDEr",
        "1.250",
        "12.18",
    ):
        assert text in shown
    assert "four" not in shown


def test_a_bar_is_for_terminals_only():
    console = Console(record=True, width=100)
    with progress_bar(console, "generating", 2) as told:
        told(1)
    assert console.export_text() == ""

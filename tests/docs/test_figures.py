"""Pages show figures of reports light and dark, and the dark ones are of the same data."""

import numpy as np
import pytest
from PIL import Image
from tools.figures import DOCS, dark_name, on_dark, shown_figures

FIGURES = shown_figures()


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")) / 255


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: f"{path.parents[2].name}-{path.stem}")
def test_the_dark_twin_is_of_the_same_figure(figure):
    made, wanted = pixels(dark_name(figure)), on_dark(pixels(figure))
    other = np.abs(made - wanted).max(2) > 0.2  # the file has a palette of 128 colours
    assert other.mean() < 1e-4, f"{figure.name} has changed: python -m tools.figures dark"


def test_every_figure_of_a_report_is_shown_both_ways():
    assert len(FIGURES) > 5
    for page in DOCS.rglob("*.md"):
        assert "](../experiments/results" not in "".join(
            line for line in page.read_text().splitlines() if line.startswith("![")
        ), page.name


def test_dark_is_the_ground_and_light_the_ink():
    white, black, blue = (np.array([[colour]]) for colour in ([1.0, 1, 1], [0.0, 0, 0], [0, 0.45, 0.7]))
    assert on_dark(white).max() < 0.15
    assert on_dark(black).min() > 0.85
    assert on_dark(blue).argmax() == 2
    assert on_dark(blue).mean() > blue.mean()

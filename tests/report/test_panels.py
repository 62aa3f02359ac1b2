"""Panels of figures and the legend above them."""

from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.report.panels import legend_of, pages


@pytest.mark.parametrize("panels", [1, 2, 3])
@pytest.mark.parametrize("names", [["fsl-sage"], [*ALGORITHMS, "splitfed-ss --joint-step", "mine:" + "Long" * 9]])
def test_a_legend_is_never_wider_than_its_figure(panels, names):
    (drawing,) = pages("name", "caption", [("title", None)] * panels, lambda axes, _: None, legend=legend_of(names))
    canvas = FigureCanvasAgg(drawing.figure)
    canvas.draw()
    extent = drawing.figure.legends[0].get_window_extent(canvas.get_renderer())
    assert extent.x0 >= 0
    assert extent.x1 <= drawing.figure.bbox.width


@pytest.mark.parametrize("panels", [1, 3])
def test_titles_of_many_options_do_not_meet(panels):
    title = ", ".join(f"alignment batch size {number}, hold 0.03" for number in range(9))
    (drawing,) = pages("name", "caption", [(title, None)] * panels, lambda axes, _: None)
    canvas = FigureCanvasAgg(drawing.figure)
    canvas.draw()
    extents = [axes.title.get_window_extent(canvas.get_renderer()) for axes in drawing.figure.axes]
    assert all(before.x1 < after.x0 for before, after in pairwise(extents))
    assert extents[0].x0 >= 0
    assert extents[-1].x1 <= drawing.figure.bbox.width

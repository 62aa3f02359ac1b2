"""Panels of figures and the legend above them."""

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

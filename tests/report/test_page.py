"""The page in a real browser: it is drawn, complains of nothing, and its controls change the plot."""

import pytest

from fsl_sage.report.write import ReportOptions, write_report
from tests.report.browser import CHROMIUM, chromium
from tests.report.made_up import made_up_config, write_grid, write_run

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)"
)


def lines(page):
    """Name, visibility and first x and y of every line in the plot."""
    return page.value(
        "curves.data.filter((trace) => trace.showlegend !== false).map((trace, place) => ({name: trace.name, "
        "shown: curves._fullData.find((full) => full.index === curves.data.indexOf(trace)).visible, "
        "x: trace.x[0], last: trace.x[trace.x.length - 1], y: trace.y[0]}))"
    )


def drawn(page):
    """Paths of lines that are really there."""
    return page.value("document.querySelectorAll('#curves .scatterlayer .trace .js-line').length")


def press(page, name, value):
    page.click(f'button[data-set="{name}"][data-value="{value}"]')
    page.until(f"document.querySelector('button[data-set=\"{name}\"][data-value=\"{value}\"]').ariaPressed === 'true'")


def check_controls(page, algorithms):
    """Everything that a reader can do with the curves of a page that has been opened."""
    page.until("document.querySelectorAll('#curves .scatterlayer .trace').length > 0")
    first = lines(page)
    assert [line["name"] for line in first] == algorithms
    assert drawn(page) >= len(algorithms)
    assert page.value("curves._fullLayout.xaxis.title.text").startswith("communication, GiB")
    assert page.value("curves.layout.yaxis.title.text") == "test accuracy, %"

    press(page, "x", "rounds")
    assert [line["x"] for line in lines(page)] == [1] * len(algorithms)
    assert page.value("curves._fullLayout.xaxis.title.text") == "rounds"
    press(page, "x", "seconds")
    assert lines(page)[0]["last"] != first[0]["last"]
    press(page, "x", "gib")
    assert lines(page) == first

    for axis, name in (("xaxis", "xScale"), ("yaxis", "yScale")):
        press(page, name, "log")
        assert page.value(f"curves._fullLayout.{axis}.type") == "log"
        press(page, name, "linear")
        assert page.value(f"curves._fullLayout.{axis}.type") == "linear"

    press(page, "metric", "1")
    assert page.value("curves.layout.yaxis.title.text") == "test loss"
    assert lines(page)[0]["y"] != first[0]["y"]
    press(page, "metric", "0")

    page.click("#curves .legendtoggle")
    page.until("curves._fullData.some((trace) => trace.visible === 'legendonly')")
    assert [line["shown"] for line in lines(page)] == ["legendonly"] + [True] * (len(algorithms) - 1)
    press(page, "x", "rounds")
    assert lines(page)[0]["shown"] == "legendonly", "what is hidden stays hidden on another axis"
    page.click("#curves .legendtoggle")
    page.until("curves._fullData.every((trace) => trace.visible === true)")

    place = page.value(
        "(() => { const box = document.querySelector('#curves .points path').getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] - 3, y=place[1])
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    page.until("document.querySelectorAll('#curves .hoverlayer .hovertext').length > 0")
    assert "round 1, " in page.value("document.querySelector('#curves .hoverlayer').textContent")
    assert page.value("performance.getEntriesByType('resource').length") == 0, "the page loads nothing"
    assert page.problems == []


@pytest.mark.slow
@pytest.mark.drawn
@needs_chromium
def test_the_page_of_a_grid_is_drawn_and_its_controls_work(tmp_path):
    write_grid(tmp_path / "grid", seeds=2, partitions=("iid", 0.1))
    report = write_report(tmp_path / "grid", tmp_path / "report", ReportOptions())
    with chromium(tmp_path / "profile") as page:
        page.size(1280, 900)
        page.open(report.page)
        check_controls(page, ["FSL-SAGE", "Lazy FSL-SAGE", "CSE-FSL", "SplitFed-MS", "SplitFed-SS", "FedAvg"])
        assert page.value("document.querySelectorAll('.finding').length") == 2
        assert page.value("[...document.images].every((image) => image.naturalWidth > 300)")

        hide = "[...document.querySelectorAll('#curves .traces')].find((one) => one.textContent === 'SplitFed-MS')"
        place = page.value(
            f"(() => {{ const box = {hide}.querySelector('.legendtoggle').getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            page.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)
        page.until("curves._fullData.some((trace) => trace.visible === 'legendonly')")
        press(page, "metric", "2")
        assert [line["shown"] for line in lines(page)] == [True] * 3, "SplitFed-MS has no fidelity; no other is hidden"
        press(page, "metric", "0")
        assert [line["name"] for line in lines(page) if line["shown"] is not True] == ["SplitFed-MS"]

        before = lines(page)
        page.value(
            "(() => { const choice = document.querySelector('select[data-set=setting]'); choice.value = 1;"
            "choice.dispatchEvent(new Event('change')); })()"
        )
        assert [line["name"] for line in lines(page)] == [line["name"] for line in before]
        assert lines(page)[0]["y"] != before[0]["y"]
        press(page, "by", "setting")
        assert [line["name"] for line in lines(page)] == ["iid", "α = 0.1"]

        page.size(400, 800)
        page.until("curves._fullLayout.width < 400")
        assert page.value("document.documentElement.scrollWidth") <= 400, "nothing sticks out on a telephone"
        assert page.problems == []


@pytest.mark.slow
@pytest.mark.drawn
@needs_chromium
def test_the_page_of_one_run_is_drawn(tmp_path):
    write_run(tmp_path / "run", made_up_config("fedavg"))
    report = write_report(tmp_path / "run", tmp_path / "report", ReportOptions())
    with chromium(tmp_path / "profile") as page:
        page.open(report.page)
        page.until("document.querySelectorAll('#curves .scatterlayer .trace').length === 1")
        assert [line["name"] for line in lines(page)] == ["FedAvg"]
        assert page.value("document.querySelectorAll('select').length") == 0
        light = page.value("[curves.layout.paper_bgcolor, curves.data[0].line.color]")
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        page.until("curves.layout.paper_bgcolor !== '#ffffff'")  # a page that is open turns with the system
        dark = page.value("[curves.layout.paper_bgcolor, curves.data[0].line.color]")
        assert light == ["#ffffff", "#E69F00"]
        assert dark == ["#161b22", "#eebc4d"]
        assert page.value("getComputedStyle(document.body).color") == "rgb(230, 234, 241)"
        assert page.problems == []

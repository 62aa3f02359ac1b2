"""What a report writes: figures for which there are data, tables in three forms, one page."""

import csv
import math
import re
import time

import numpy as np
import pytest
from PIL import Image

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.errors import InputError
from fsl_sage.experiment import run
from fsl_sage.report.figures import draw_figures
from fsl_sage.report.load import load_runs
from fsl_sage.report.panels import save
from fsl_sage.report.study import make_study
from fsl_sage.report.style import style
from fsl_sage.report.write import ReportOptions, write_report
from tests.report.made_up import made_up_config, write_grid, write_run

CURVES = ["accuracy-gib", "accuracy-rounds", "loss-gib", "loss-rounds"]


def names_of(folder):
    return [drawing.name for drawing in draw_figures(make_study(load_runs(folder)[0]), 100.0)]


@pytest.mark.drawn
@pytest.mark.parametrize("algorithm", ["fedavg", "mine", "another"])
def test_a_runs_own_figure_has_the_colour_that_its_algorithm_has_in_reports(algorithm, tiny, monkeypatch):
    for name in ("mine", "another"):
        monkeypatch.setitem(ALGORITHMS, name, type(name, (ALGORITHMS["fedavg"],), {}))
    figure = Image.open(run(tiny(algorithm=algorithm)).directory / "accuracy.png").convert("RGB")
    seen = {f"#{r:02X}{g:02X}{b:02X}" for _, (r, g, b) in figure.getcolors(maxcolors=2**24)}
    assert [name for name in ALGORITHMS if style(name).colour in seen] == [algorithm]


def test_one_run_has_its_curves_fidelity_classes_and_latency(tmp_path):
    write_run(tmp_path / "run", made_up_config("fsl-sage"))
    assert names_of(tmp_path) == [*CURVES, "fidelity-cosine", "fidelity-nmse", "classes", "latency"]
    assert names_of(tmp_path / "run") == names_of(tmp_path)


def title_of(figure):
    """Above the legend where there is one: there a figure's own title would cover it."""
    assert not (figure.legends and figure.get_suptitle())
    return figure.legends[0].get_title().get_text() if figure.legends else figure.get_suptitle()


def test_every_figure_says_what_it_is_about(tmp_path):
    write_grid(tmp_path / "grid", seeds=1)
    write_run(tmp_path / "one", made_up_config("fsl-sage"))
    titles = {"grid": "resnet18 on cifar10-mini, 10 clients", "one": "resnet18 on cifar10-mini, iid, 5 clients"}
    for folder, title in titles.items():
        drawings = draw_figures(make_study(load_runs(tmp_path / folder)[0]), 100.0)
        assert {title_of(drawing.figure) for drawing in drawings} == {title}
    panels = [axes.get_title() for axes in drawings[0].figure.axes]
    assert panels == [""], "what does not vary stands above the figure alone"


@pytest.mark.parametrize(("clients", "labels"), [(3, 3), (13, 13), (30, 30), (100, None)])
def test_every_client_is_labelled_where_there_is_room(clients, labels, tmp_path):
    write_run(tmp_path / "run", made_up_config("fsl-sage", clients=clients, rounds=1))
    drawn = {drawing.name: drawing for drawing in draw_figures(make_study(load_runs(tmp_path)[0]), 1.0)}
    axes = drawn["classes"].figure.axes[0]
    shown = [tick.get_text() for tick in axes.get_yticklabels()]
    assert len(shown) < 30 if labels is None else shown == [str(client) for client in range(labels)]


def test_fidelity_right_after_an_alignment_is_marked(tmp_path):
    write_run(tmp_path / "run", made_up_config("fsl-sage"))
    drawn = {drawing.name: drawing for drawing in draw_figures(make_study(load_runs(tmp_path)[0]), 1.0)}
    for name, value in (("fidelity-cosine", 0.85), ("fidelity-nmse", 0.3)):
        (axes,) = drawn[name].figure.axes
        (marks,) = (line for line in axes.get_lines() if line.get_marker() == "D")
        assert [y for y in marks.get_ydata() if np.isfinite(y)] == [value] * 3, "rounds 0, 5 and 10"


def test_what_was_not_recorded_is_not_drawn(tmp_path):
    run = write_run(tmp_path / "run", made_up_config("fedavg"))
    (run / "classes.csv").unlink()
    assert names_of(tmp_path) == [*CURVES, "latency"]


def test_several_partitions_are_drawn_against_alpha(tmp_path):
    write_grid(tmp_path, seeds=1)
    assert {"best-against-alpha", "accuracy-communication"} < set(names_of(tmp_path))


def test_a_varied_option_has_an_ablation_with_the_others_as_baselines(tmp_path):
    for interval in (2, 5):
        write_run(tmp_path / f"sage{interval}", made_up_config("fsl-sage", align_every=interval))
    write_run(tmp_path / "cse", made_up_config("cse-fsl"))
    (drawing,) = (
        drawing
        for drawing in draw_figures(make_study(load_runs(tmp_path)[0]), 100.0)
        if drawing.name == "ablation-alignment-interval"
    )
    (axes,) = drawing.figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "5"]
    flat = [line for line in axes.get_lines() if list(line.get_xdata()) == [0, 1]]
    assert len(flat) == 1, "CSE-FSL is a horizontal line"


def test_auxiliaries_stand_in_the_order_of_their_size(tmp_path):
    for name, size in (("full", 42_000_000), ("half", 3_500_000), ("linear", 5_000)):
        run = write_run(tmp_path / name, made_up_config("cse-fsl", model={"auxiliary": name}))
        text = (run / "ledger.csv").read_text().replace("8419408", str(size))
        (run / "ledger.csv").write_text(text)
    study = make_study(load_runs(tmp_path)[0])
    (axes,) = next(each for each in draw_figures(study, 1.0) if each.name == "ablation-auxiliary").figure.axes
    labels = [tick.get_text() for tick in axes.get_xticklabels()]
    assert labels == ["linear\n5 kB", "half\n3.5 MB", "full\n42 MB"]


def test_many_settings_are_spread_over_several_figures(tmp_path):
    for clients in range(2, 10):
        write_run(tmp_path / f"{clients}", made_up_config("fedavg", clients=clients, rounds=2))
    drawn = {drawing.name: drawing for drawing in draw_figures(make_study(load_runs(tmp_path)[0]), 1.0)}
    assert len([axes for axes in drawn["accuracy-gib"].figure.axes if axes.axison]) == 6
    assert len([axes for axes in drawn["accuracy-gib-2"].figure.axes if axes.axison]) == 2


@pytest.mark.slow
@pytest.mark.drawn
def test_the_report_is_figures_tables_and_a_page_that_needs_nothing_else(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage"))
    write_run(tmp_path / "b", made_up_config("cse-fsl"), finished=False)
    report = write_report(tmp_path, tmp_path / "out", ReportOptions(target=(0.3,)))
    figures = {file.name for file in (tmp_path / "out" / "figures").iterdir()}
    assert {f"{name}.{kind}" for name in CURVES for kind in ("png", "pdf")} < figures
    for file in (tmp_path / "out" / "figures").glob("*.png"):
        pixels = np.asarray(Image.open(file).convert("L"))
        assert pixels.std() > 5, f"{file.name} is blank"
    tables = {file.name for file in (tmp_path / "out" / "tables").iterdir()}
    names = ("best-accuracy", "final-accuracy", "equal-accuracy", "to-target", "runs")
    assert tables == {f"{name}.{kind}" for name in names for kind in ("md", "csv", "tex")}
    page = report.page.read_text()
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', page)
    assert page.count("plotly.js v") == 1
    assert report.notes == ["Not finished yet, as far as they are: b."]


@pytest.mark.slow
@pytest.mark.drawn
def test_the_same_data_give_the_same_files(tmp_path):
    write_run(tmp_path / "a", made_up_config("fedavg", rounds=2))
    contents = []
    for _ in range(2):
        drawing = draw_figures(make_study(load_runs(tmp_path)[0]), 100.0)[-1]
        save(drawing, tmp_path)
        contents.append([(tmp_path / f"latency.{kind}").read_bytes() for kind in ("png", "pdf")])
        time.sleep(1.1)  # a date in a file would differ
    assert contents[0] == contents[1]


@pytest.mark.parametrize("options", [{"target": (math.inf,)}, {"target": (0.0,)}, {"bandwidth": 0.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(InputError, match="is not possible"):
        ReportOptions(**options)


def test_an_accuracy_above_one_is_no_target(tmp_path):
    write_grid(tmp_path / "grid", seeds=1)
    with pytest.raises(InputError, match="--target 50 is not possible: give a fraction above 0, at most 1"):
        write_report(tmp_path / "grid", tmp_path / "report", ReportOptions(target=(50.0,)))


@pytest.mark.slow
@pytest.mark.drawn
def test_a_report_of_two_hundred_runs(tmp_path):
    write_grid(tmp_path / "grid", seeds=11, partitions=("iid", 1.0, 0.1))
    write_report(tmp_path / "grid", tmp_path / "report", ReportOptions())
    with open(tmp_path / "report" / "tables" / "runs.csv") as file:
        assert len(file.readlines()) == 1 + 11 * 3 * 6
    with open(tmp_path / "report" / "tables" / "best-accuracy.csv") as file:
        assert {line["seeds"] for line in csv.DictReader(file)} == {"11"}
    assert (tmp_path / "report" / "report.html").stat().st_size < 10_000_000

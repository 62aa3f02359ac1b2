"""What a report says of runs that are not alike: copies, other lengths and data, lower scores, names of all kinds."""

import json
import sys

import pytest

from fsl_sage import report
from fsl_sage.problems.score import Score
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.html import make_page
from fsl_sage.report.load import load_runs
from fsl_sage.report.study import make_study
from fsl_sage.report.tables import _rounded, default_target, make_tables
from fsl_sage.watch.folder import Watched

from .made_up import made_up_config, write_run


def study_of(folder):
    return make_study(load_runs(folder)[0])


def judged_by(path, score):
    """The run in a directory, judged by another score: its accuracies under another name."""
    RunDirectory(path).save_score(score)
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"test_accuracy"', json.dumps(score.name)))


def test_a_copy_of_a_run_is_no_other_seed(tmp_path):
    for name, seed, best in (("a", 1, 0.3), ("copy/a", 1, 0.3), ("b", 2, 0.5)):
        write_run(tmp_path / name, made_up_config("fsl-sage", seed), accuracies=[0.1, best])
    (series,) = study_of(tmp_path).series
    assert series.best(study_of(tmp_path).main_metric) == pytest.approx((40.0, 14.142, 2), abs=0.001)
    assert any("is not counted: a has the same options and the same seed" in note for note in report(tmp_path).notes)


def test_a_finished_run_counts_before_an_unfinished_copy(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage", 1), accuracies=[0.1], finished=False)
    write_run(tmp_path / "b", made_up_config("fsl-sage", 1), accuracies=[0.1, 0.5])
    assert [run.name for run in study_of(tmp_path).series[0].runs] == ["b"]


def test_runs_of_other_lengths_are_said(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage", rounds=3))
    write_run(tmp_path / "b", made_up_config("cse-fsl", rounds=3))
    assert study_of(tmp_path).unequal() == []
    write_run(tmp_path / "c", made_up_config("fedavg", rounds=8, batch_size=8))
    assert study_of(tmp_path).unequal() == [
        "--rounds is not the same for all: 3 for FSL-SAGE and CSE-FSL; 8 for FedAvg.",
        "--batch-size is not the same for all: 32 for FSL-SAGE and CSE-FSL; 8 for FedAvg.",
    ]


def test_folders_that_ones_own_code_reads_are_settings_and_others_are_not(tmp_path):
    for name, apart in (("mine:problem", 2), ("cifar10", 1)):
        for place in ("one", "other"):
            data = {"name": name, "dir": f"/{place}"}
            write_run(tmp_path / name / place, made_up_config("fsl-sage", data=data))
        assert len(study_of(tmp_path / name).series) == apart


def test_of_a_score_where_less_is_better_the_target_is_a_low_one(tmp_path):
    for name, errors in (("fsl-sage", [0.9, 0.5, 0.31]), ("cse-fsl", [0.92, 0.6, 0.41])):
        judged_by(write_run(tmp_path / name, made_up_config(name), accuracies=errors), Score("test_error", False, True))
    study = study_of(tmp_path)
    assert default_target(study, study.settings[0], study.main_metric) == pytest.approx(0.45)


def test_a_run_that_is_judged_by_something_else_has_not_missed_the_target(tmp_path):
    for name in ("fsl-sage", "cse-fsl", "fedavg"):
        write_run(tmp_path / name, made_up_config(name), accuracies=[0.2, 0.4])
    judged_by(tmp_path / "fedavg", Score("test_recall"))
    tables = {table.name: table for table in make_tables(study_of(tmp_path), [0.3])}
    assert [line["algorithm"] for line in tables["to-target"].data] == ["fsl-sage", "cse-fsl"]


NAMES = ["recall/top5", "../../x", 'test_x"><img src=x onerror=alert(1)>', "<!--<script>", "точность", "recall@5"]


@pytest.mark.parametrize("name", NAMES)
def test_a_score_may_have_any_name(tmp_path, name):
    folder = tmp_path / "a" / "b" / "c"
    for algorithm in ("fsl-sage", "cse-fsl"):
        judged_by(write_run(folder / algorithm, made_up_config(algorithm, rounds=2)), Score(name))
    page = report(folder).page.read_text()
    assert "<img src=x" not in page
    assert "<!--<script>" not in page
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    assert {path.name for path in folder.iterdir()} == {"fsl-sage", "cse-fsl", "report"}
    assert RunDirectory(folder).figure(Score(name)).parent == folder


def test_options_of_every_algorithm_are_on_the_page(tmp_path):
    write_run(tmp_path / "a", made_up_config("cse-fsl"))
    for each in (2, 5):
        write_run(tmp_path / f"s{each}", made_up_config("fsl-sage", align_every=each))
    page = make_page("t", study_of(tmp_path), [], [], [], 100)
    assert "<th>--align-every</th>" in page


@pytest.mark.parametrize(("value", "kept"), [(12.3456789, 12.345679), (4.123456e-7, 4.123e-7), (0.0, 0.0), (None, "")])
def test_small_amounts_stay_numbers(value, kept):
    assert _rounded(value) == kept


def test_code_that_a_run_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "harmful_helper.py").write_text("raise SystemExit('imported')")
    write_run(tmp_path / "runs" / "a", made_up_config("fsl-sage"))
    file = tmp_path / "runs" / "a" / "config.json"
    file.write_text(file.read_text().replace('"fsl-sage"', '"harmful_helper:Algo"'))
    monkeypatch.chdir(tmp_path)
    runs, notes = load_runs(tmp_path / "runs")
    assert make_tables(make_study(runs), ()) or notes
    Watched(tmp_path / "runs").state()
    assert "harmful_helper" not in sys.modules

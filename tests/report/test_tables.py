"""Tables: what is best, what a target costs, and the forms they are written in."""

import csv
import io
import json

from fsl_sage.problems.score import Score
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.load import load_runs
from fsl_sage.report.study import make_study
from fsl_sage.report.table_forms import to_csv, to_html, to_latex, to_markdown
from fsl_sage.report.tables import make_tables
from tests.report.made_up import made_up_config, write_grid, write_run


def tables_of(folder, targets=()):
    study = make_study(load_runs(folder)[0])
    return {table.name: table for table in make_tables(study, targets)}


def three_algorithms(folder):
    write_run(folder / "s1", made_up_config("fsl-sage", 1, align_every=100), accuracies=[0.20, 0.40, 0.50])
    write_run(folder / "s2", made_up_config("fsl-sage", 2, align_every=100), accuracies=[0.20, 0.42, 0.56])
    write_run(folder / "c1", made_up_config("cse-fsl", 1), accuracies=[0.30, 0.41, 0.57])
    write_run(folder / "c2", made_up_config("cse-fsl", 2), accuracies=[0.20, 0.39, 0.57])
    write_run(folder / "f1", made_up_config("fedavg", 1), accuracies=[0.10, 0.15, 0.14])
    write_run(folder / "f2", made_up_config("fedavg", 2), accuracies=[0.10, 0.15, 0.14])
    return folder


def test_the_best_is_bold_and_the_second_underlined(tmp_path):
    table = tables_of(three_algorithms(tmp_path))["best-accuracy"]
    assert [(row[0].text, row[1].text, row[1].spread, row[1].rank) for row in table.rows] == [
        ("FSL-SAGE", "53.00", "4.24", 2),
        ("CSE-FSL", "57.00", "0.00", 1),
        ("FedAvg", "15.00", "0.00", 0),
    ]
    assert "| CSE-FSL | **57.00** ± 0.00 |" in to_markdown(table)
    assert "| FSL-SAGE | <u>53.00</u> ± 4.24 |" in to_markdown(table)
    assert r"CSE-FSL & \textbf{57.00} {\scriptsize $\pm$ 0.00} \\" in to_latex(table)
    assert r"FSL-SAGE & \underline{53.00} {\scriptsize $\pm$ 4.24} \\" in to_latex(table)
    assert "<b>57.00</b> <small>± 0.00</small>" in to_html(table)
    records = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [(record["algorithm"], float(record["test_accuracy_percent"]), record["seeds"]) for record in records] == [
        ("fsl-sage", 53.0, "2"),
        ("cse-fsl", 57.0, "2"),
        ("fedavg", 15.0, "2"),
    ]


def test_equal_numbers_share_a_rank(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage"), accuracies=[0.5])
    write_run(tmp_path / "b", made_up_config("cse-fsl"), accuracies=[0.500001])
    write_run(tmp_path / "c", made_up_config("fedavg"), accuracies=[0.4])
    assert [row[1].rank for row in tables_of(tmp_path)["best-accuracy"].rows] == [1, 1, 2]


def test_an_algorithm_alone_is_not_the_best(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage"), accuracies=[0.5])
    tables = tables_of(tmp_path)
    assert tables["best-accuracy"].rows[0][1].rank == 0
    assert "equal-accuracy" not in tables


def test_at_equal_communication_only_the_bytes_that_all_have_moved_count(tmp_path):
    table = tables_of(three_algorithms(tmp_path))["equal-accuracy"]
    # FSL-SAGE moved 3 x 14 MB and an auxiliary of 8.4 MB a client: 50.4 MB. CSE-FSL moved 39.4 MB in its first round.
    assert [row[1].text for row in table.rows] == ["53.00", "25.00", "–"]
    assert [(record["algorithm"], record["rounds"]) for record in table.data] == [("fsl-sage", 3), ("cse-fsl", 1)]


def test_a_seed_that_stopped_early_is_not_compared_with_more_bytes_than_it_moved(tmp_path):
    write_run(tmp_path / "s1", made_up_config("fsl-sage", 1), accuracies=[0.5])
    write_run(tmp_path / "s2", made_up_config("fsl-sage", 2), accuracies=[0.3, 0.4, 0.5])
    write_run(tmp_path / "f", made_up_config("cse-fsl", 1), accuracies=[0.1, 0.2])
    table = tables_of(tmp_path)["equal-accuracy"]
    assert [row[1].text for row in table.rows] == ["40.00", "–"]  # 50 and 30 after the first round


def test_bytes_and_rounds_to_a_target_and_their_ratio(tmp_path):
    table = tables_of(three_algorithms(tmp_path), [0.4])["to-target"]
    sage, cse, fedavg = ({**record} for record in table.data)
    gib = 2**30
    assert (sage["reached"], sage["rounds"], sage["ratio"]) == (2, 2.0, 1.0)
    assert sage["gib"] == round(5 * (2 * 14_000_000 + 8_419_408) / gib, 6)
    assert (cse["reached"], cse["seeds"], cse["rounds"]) == (2, 2, 2.5)
    assert cse["ratio"] == round(2.5 * 39_419_408 / 36_419_408, 6)
    assert (fedavg["reached"], fedavg["gib"], fedavg["ratio"]) == (0, "", "")
    texts = [cell.text for cell in table.rows[2]]
    assert texts[5] == f"> {5 * 3 * 90_000_000 / gib:.3f}"
    assert texts[6] == f"> {3 * 90_000_000 / 36_419_408:.2f}"


def test_a_target_that_some_seeds_miss_has_no_ratio(tmp_path):
    cells = tables_of(three_algorithms(tmp_path), [0.41])["to-target"].rows
    assert [[cell.text for cell in row][3] for row in cells] == ["2/2", "2/2", "0/2"]
    cells = tables_of(tmp_path, [0.55])["to-target"].rows
    assert [cells[0][place].text for place in (3, 6)] == ["1/2", "–"]
    assert cells[1][6].text == "–"


def test_the_chosen_target_is_the_highest_step_of_five_that_two_algorithms_reach_with_every_seed(tmp_path):
    assert tables_of(three_algorithms(tmp_path))["to-target"].data[0]["target"] == 0.5


def test_the_accuracy_that_ends_the_runs_is_their_target(tmp_path):
    for name in ("fsl-sage", "cse-fsl"):
        write_run(tmp_path / name, made_up_config(name, target_accuracy=0.47), accuracies=[0.2, 0.5])
    assert tables_of(tmp_path)["to-target"].data[0]["target"] == 0.47


def test_many_settings_make_rows_and_few_make_columns(tmp_path):
    few = tables_of(write_grid(tmp_path / "few", seeds=1))["best-accuracy"]
    assert few.columns == ["algorithm", "iid", "α = 1", "α = 0.1"]
    many = tables_of(write_grid(tmp_path / "many", 1, (0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)))["best-accuracy"]
    assert many.columns[:3] == ["setting", "FSL-SAGE", "Lazy FSL-SAGE"]
    assert [row[0].text for row in many.rows][:2] == ["α = 10000", "α = 1000"]


def test_latex_escapes_what_it_would_read_as_commands(tmp_path):
    write_run(tmp_path / "a_b", made_up_config("fsl-sage"), accuracies=[0.5])
    text = to_latex(tables_of(tmp_path)["runs"])
    assert r"a\_b &" in text
    assert text.count("{") == text.count("}")


def test_runs_that_are_judged_by_another_score_stand_beside(tmp_path):
    write_grid(tmp_path, seeds=1, partitions=("iid",))
    other = write_run(tmp_path / "mine", made_up_config("fedavg", seed=9))
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["test_rmse"] = line.pop("test_accuracy")
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    RunDirectory(other).save_score(Score("test_rmse", higher_is_better=False))
    write_run(tmp_path / "too", made_up_config("fedavg", seed=10))
    runs = tables_of(tmp_path)["runs"]
    (line,) = [line for line in runs.data if line["run"] == "mine"]
    assert (line["best"], line["final"]) == ("", "")


def test_small_steps_keep_digits_that_count(tmp_path):
    path = write_run(tmp_path / "a", made_up_config("fedavg"), accuracies=[0.5])
    line = json.loads((path / "metrics.jsonl").read_text())
    small = {"client_static_bytes": 5000, "client_working_bytes": 1234, "client_step_flops": 23_456}
    (path / "metrics.jsonl").write_text(json.dumps({**line, **small}) + "\n")
    table = tables_of(tmp_path)["runs"]
    assert (table.data[0]["client_memory_mb"], table.data[0]["client_gflops"]) == (0.006234, 0.00002346)
    shown = dict(zip(table.columns, table.rows[0], strict=True))
    assert shown["client MB"].text == "0.006234"
    assert shown["client GFLOPs"].text == "0.00002346"

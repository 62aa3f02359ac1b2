"""From run directories to settings, series and their statistics."""

import json

import numpy as np
import pytest

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.report.load import load_runs
from fsl_sage.report.metric import ACCURACY, COSINE
from fsl_sage.report.options import options_of, settings_of
from fsl_sage.report.study import Setting, make_study
from fsl_sage.report.style import option_name, style
from tests.report.made_up import made_up_config, write_grid, write_run


def study_of(folder):
    return make_study(load_runs(folder)[0])


def test_series_are_the_runs_that_differ_in_the_seed_only(tmp_path):
    study = study_of(write_grid(tmp_path, seeds=2))
    assert len(study.series) == 6 * 3
    assert all(len(series.runs) == 2 for series in study.series)
    assert [setting.label for setting in study.settings] == ["iid", "α = 1", "α = 0.1"]
    assert study.algorithms[0] == "fsl-sage"
    assert all(len(study.within(setting)) == 6 for setting in study.settings)


def test_an_option_that_does_not_concern_an_algorithm_does_not_part_it_from_the_others(tmp_path):
    for interval in (10, 2):
        write_run(tmp_path / f"sage{interval}", made_up_config("fsl-sage", align_every=interval))
    write_run(tmp_path / "cse", made_up_config("cse-fsl"))
    write_run(tmp_path / "lazy", made_up_config("lazy-fsl-sage", align_every=2))
    study = study_of(tmp_path)
    assert study.varying == ("align_every",)
    assert [setting.label for setting in study.settings] == ["alignment interval 2", "alignment interval 10"]
    two, ten = ([series.algorithm for series in study.within(setting)] for setting in study.settings)
    assert two == ["fsl-sage", "lazy-fsl-sage", "cse-fsl"]
    assert ten == ["fsl-sage", "cse-fsl"]


def test_a_switch_that_one_of_several_algorithms_has_makes_two_variants_of_it(tmp_path):
    for joint in (False, True):
        write_run(tmp_path / f"joint{joint}", made_up_config("splitfed-ss", joint_step=joint))
    write_run(tmp_path / "cse", made_up_config("cse-fsl"))
    study = study_of(tmp_path)
    assert study.varying == ()
    assert study.algorithms == ["cse-fsl", "splitfed-ss", "splitfed-ss --joint-step"]
    assert [[one.algorithm for one in study.within(setting)] for setting in study.settings] == [study.algorithms]
    plain, joint = (style(name) for name in study.algorithms[1:])
    assert (plain.name, joint.name) == ("SplitFed-SS", "SplitFed-SS, joint step")
    assert plain.colour == joint.colour
    assert plain.dash != joint.dash
    assert plain.marker != joint.marker


def test_a_switch_of_the_only_algorithm_is_a_setting(tmp_path):
    for local in (False, True):
        write_run(tmp_path / f"local{local}", made_up_config("fsl-sage", local_auxiliary=local))
    study = study_of(tmp_path)
    assert study.varying == ("local_auxiliary",)
    assert study.algorithms == ["fsl-sage"]


def test_runs_on_other_data_are_never_in_one_setting_but_every_algorithm_may_have_its_own_rate(tmp_path):
    write_run(tmp_path / "sage", made_up_config("fsl-sage", data={"partition": "dirichlet", "alpha": 0.1}))
    write_run(tmp_path / "cse", made_up_config("cse-fsl", optimizer={"lr": 0.01}))
    study = study_of(tmp_path)
    assert study.varying == ("heterogeneity",)
    assert [[one.algorithm for one in study.within(setting)] for setting in study.settings] == [
        ["cse-fsl"],
        ["fsl-sage"],
    ]


def test_where_and_how_a_run_was_computed_is_no_setting(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage", 1, device="cpu", workers=1))
    write_run(tmp_path / "b", made_up_config("fsl-sage", 2, device="auto", workers=2))
    assert len(study_of(tmp_path).series) == 1


def test_what_is_not_given_has_a_name(tmp_path):
    for name, model in (("usual", {}), ("half", {"auxiliary": "half"})):
        write_run(tmp_path / name, made_up_config("fsl-sage", model=model))
    write_run(tmp_path / "until", made_up_config("fsl-sage", align_until=3))
    assert {setting.label for setting in study_of(tmp_path).settings} == {
        "align until none, auxiliary usual", "align until none, auxiliary half", "align until 3, auxiliary usual",
    }  # fmt: skip


def test_mean_and_spread_are_over_the_seeds(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage", 1), accuracies=[0.1, 0.4, 0.3])
    write_run(tmp_path / "b", made_up_config("fsl-sage", 2), accuracies=[0.3, 0.2, 0.5])
    (series,) = study_of(tmp_path).series
    curve = series.curve(ACCURACY)
    np.testing.assert_allclose(curve.mean, [20, 30, 40])
    np.testing.assert_allclose(curve.std, 10 * np.sqrt(2))
    assert series.best(ACCURACY) == pytest.approx((45, 5 * np.sqrt(2), 2))
    assert series.final(ACCURACY) == pytest.approx((40, 10 * np.sqrt(2), 2))
    assert series.best(ACCURACY, within_gib=curve.gib[1]) == pytest.approx((35, 5 * np.sqrt(2), 2))
    assert series.best(ACCURACY, within_gib=curve.gib[0] / 2) is None
    assert [rounds for rounds, _ in series.reaching(ACCURACY, 0.4)] == [2, 3]
    assert series.reaching(ACCURACY, 0.6) == []


def test_a_curve_goes_as_far_as_every_seed_does(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage", 1), accuracies=[0.1, 0.4])
    write_run(tmp_path / "b", made_up_config("fsl-sage", 2), accuracies=[0.3, 0.2, 0.5])
    (series,) = study_of(tmp_path).series
    assert series.curve(ACCURACY).rounds.tolist() == [1, 2]
    assert series.best(ACCURACY).mean == pytest.approx(45)


def test_unfinished_seeds_count_only_while_none_is_finished(tmp_path):
    write_run(tmp_path / "a", made_up_config("fsl-sage", 1), accuracies=[0.1], finished=False)
    assert len(study_of(tmp_path).series[0].runs) == 1
    write_run(tmp_path / "b", made_up_config("fsl-sage", 2), accuracies=[0.3, 0.4])
    (series,) = study_of(tmp_path).series
    assert [run.seed for run in series.runs] == [2]
    assert len(series.all_runs) == 2


def test_communication_takes_as_long_as_the_busiest_client_needs(tmp_path):
    run = write_run(tmp_path / "a", made_up_config("fedavg", clients=2), accuracies=[0.1, 0.2, 0.3])
    ledger = [
        "round,client,direction,kind,bytes",
        "-1,0,down,first download,1000000",
        "-1,1,down,first download,3000000",
    ]
    ledger += ["0,0,up,labels,1000000", "0,0,down,full model,1000000", "0,1,up,full model,1500000"]
    ledger += ["1,0,up,full model,500000", "1,1,up,full model,4000000", "2,0,up,full model,9000000"]
    (run / "ledger.csv").write_text("\n".join(ledger) + "\n")
    (series,) = study_of(tmp_path).series
    assert series.communication_seconds(2, bandwidth=8) == pytest.approx(3 + 2 + 4)
    assert series.communication_seconds(3, bandwidth=80) == pytest.approx(1.8)


def test_a_round_that_was_slow_with_one_seed_does_not_make_an_algorithm_slow(tmp_path):
    for seed, seconds in enumerate([[2, 3, 2], [2, 900, 4], [30, 5, 3]]):
        run = write_run(tmp_path / str(seed), made_up_config("fedavg", seed=seed), accuracies=[0.1, 0.2, 0.3])
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {"seconds": second} for line, second in zip(lines, seconds, strict=True)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (series,) = study_of(tmp_path).series
    assert series.computation_seconds(3) == 2 + 5 + 3
    assert series.computation_seconds(1) == 2


def test_what_was_not_measured_is_not_a_number(tmp_path):
    study = study_of(write_run(tmp_path / "a", made_up_config("fedavg")).parent)
    assert not study.has(COSINE)
    assert np.isnan(study.runs[0].values("fidelity_cosine")).all()


def test_a_torn_last_line_is_left_out(tmp_path):
    run = write_run(tmp_path / "a", made_up_config("fedavg"), accuracies=[0.1, 0.2])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"round": 2, "test_acc')
    assert len(load_runs(tmp_path)[0][0].metrics) == 2


@pytest.mark.parametrize("file", ["metrics.jsonl", "ledger.csv", "config.json", "classes.csv", "result.json"])
def test_a_damaged_run_is_left_out_and_said(tmp_path, file):
    write_run(tmp_path / "good", made_up_config("fedavg"))
    (write_run(tmp_path / "bad", made_up_config("cse-fsl")) / file).write_text("a,b\nc,d\n")
    runs, notes = load_runs(tmp_path)
    assert [run.name for run in runs] == ["good"]
    assert notes == [notes[0]]
    assert notes[0].startswith("bad is left out: ")


def test_a_run_of_another_version_can_still_be_read(tmp_path):
    run = write_run(tmp_path / "a", made_up_config("fedavg", 1)) / "config.json"
    write_run(tmp_path / "b", made_up_config("fedavg", 2))
    written = json.loads(run.read_text())
    del written["config"]["cohort"], written["config"]["alignment"]["lr"]
    written["config"]["alignment"]["batch_size"] = None
    run.write_text(json.dumps(written))
    runs, notes = load_runs(tmp_path)
    assert notes == []
    assert len(make_study(runs).series) == 1, "what FedAvg does not read does not part its runs"


def test_single_runs_that_stop_aligning_at_different_rounds_are_parted(tmp_path):
    for until in (2, 5):
        write_run(tmp_path / f"{until}", made_up_config("fsl-sage", align_until=until))
    assert [setting.label for setting in study_of(tmp_path).settings] == ["align until 2", "align until 5"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="There is no run to report"):
        load_runs(tmp_path)
    with pytest.raises(InputError, match="There is no folder"):
        load_runs(tmp_path / "nowhere")


def test_settings_cover_what_says_less():
    whole = Setting({"a": 1, "b": 2})
    assert whole.covers(Setting({"b": 2}))
    assert not whole.covers(Setting({"b": 3}))
    assert whole.without("a") == Setting({"b": 2})


def test_no_two_options_have_the_same_name_for_people():
    paths = settings_of(options_of(Config()))
    assert len({option_name(path) for path in paths}) == len(paths)

"""`fsl-sage compare` and `fsl-sage report`: what they read, refuse and show."""

import io

import pytest
from rich.console import Console

from fsl_sage import cli
from fsl_sage.cli import commands
from fsl_sage.cli.progress import Progress, print_costs_of_grid
from fsl_sage.compare.dry import costs_of_runs
from fsl_sage.compare.grid import Grid, plan_runs
from fsl_sage.config import all_options, load_preset
from tests.compare.small_grid import PRESET, grid_of


@pytest.fixture
def preset(tmp_path):
    file = tmp_path / "preset.toml"
    file.write_text(PRESET)
    return file


def test_a_dry_run_prints_the_bytes_of_every_run_uncut():
    plans = plan_runs(load_preset("paper"), Grid(("fedavg", "splitfed-ms"), (1,)))
    out = io.StringIO()
    print_costs_of_grid(Console(file=out, width=40), plans, costs_of_runs(plans))
    for plan, cost in zip(plans, costs_of_runs(plans), strict=True):
        assert plan.name in out.getvalue()
        assert f"{cost['bytes_paper']:,}" in out.getvalue()
        assert f"{cost['bytes_total']:,}" in out.getvalue()


def test_the_live_table_shows_what_runs_first_when_there_is_little_room(preset, tmp_path):
    runs = grid_of(preset, tmp_path, seeds=tuple(range(40)))
    for each in runs[:30]:
        each.state = "finished"
    runs[30].state, runs[31].state, runs[31].error = "running", "failed", "the loss became nan"
    screen = Console(file=io.StringIO(), width=120, height=12, force_terminal=True)
    progress = Progress(screen)
    progress.runs = runs
    screen.print(progress._view())
    shown = screen.file.getvalue()
    assert runs[30].plan.name in shown
    assert "the loss became nan" in shown
    assert "30 of 40 runs finished, 1 running, 8 waiting, 1 failed" in shown
    assert shown.count("fsl-sage_iid") == 8


def test_plain_lines_say_what_starts_and_how_it_ended(preset, tmp_path):
    out = io.StringIO()
    first, second = runs = grid_of(preset, tmp_path, seeds=(1, 2))
    second.state = "finished"
    progress = Progress(Console(file=out, width=60))
    progress.start(runs)
    first.state, first.error = "failed", "The loss of client 0 became nan in round 0"
    progress.changed(first)
    progress.stop()
    said = f"{first.plan.name}: failed  The loss of client 0 became nan in round 0\n"
    assert out.getvalue() == "1 of 2 runs were finished before\n" + said


def test_what_cannot_run_is_refused_before_anything_starts(preset, tmp_path, capsys):
    for vary, says in (("model.name=small-cnn,huge", "--model.name huge"), ("clients=3,76", "too few")):
        with pytest.raises(SystemExit):
            cli.main(["compare", str(preset), "--out", str(tmp_path / "grid"), "--vary", vary])
        assert says in capsys.readouterr().err
    assert not (tmp_path / "grid").exists()


def test_the_command_says_how_to_go_on(preset, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "compare", interrupted)
    with pytest.raises(SystemExit) as left:
        cli.main(["compare", str(preset), "--out", str(tmp_path / "grid")])
    assert left.value.code == 130
    assert "Give the same command to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "compare needs --out"),
        (["--vary", "align_evry=2"], "'align_evry' is not an option"),
        (["--alpha", "0"], "--alpha 0 is not possible: give a number from 0.01 to 10000, or iid."),
        (["--jobs", "0"], "--jobs 0 is not possible: give a whole number from 1 up."),
        (["--jobs", "-3"], "--jobs -3 is not possible"),
        (["--vary", "align_rounds=0,1"], "as in --vary 'align_rounds=[0,1]'"),
        (["--target", "50"], "--target 50 is not possible"),
    ],
)
def test_impossible_options_end_with_one_sentence(preset, capsys, options, message):
    with pytest.raises(SystemExit) as left:
        cli.main(["compare", str(preset), *options])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_options_override_the_presets_grid(preset, monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "costs_of_runs", lambda plans: seen.extend(plan.name for plan in plans) or [])
    monkeypatch.setattr(commands, "print_costs_of_grid", lambda *_: None)
    cli.main(["compare", str(preset), "--dry-run", "--seeds", "5", "--vary", "align_every=1,2", "--rounds", "9"])
    assert sorted(seen) == [
        "cse-fsl_iid_seed5",
        "fsl-sage_iid_seed5_align-every1",
        "fsl-sage_iid_seed5_align-every2",
    ]


def until_of(plan):
    return all_options(plan.config.options).get("align_until")


def test_a_few_algorithms_of_a_preset_leave_out_what_it_says_for_the_lazy_one(preset, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(commands, "costs_of_runs", lambda plans: seen.extend(until_of(plan) for plan in plans) or [])
    monkeypatch.setattr(commands, "print_costs_of_grid", lambda *_: None)
    preset.write_text("align_until = 5\n" + PRESET)
    cli.main(["compare", str(preset), "--dry-run"])
    cli.main(["compare", str(preset), "--dry-run", "--algorithms", "lazy-fsl-sage"])
    assert seen == [None] * 4 + [5] * 2
    with pytest.raises(SystemExit):
        cli.main(["compare", str(preset), "--dry-run", "--align-until", "3"])
    assert (
        "In a comparison --align-until is an option of lazy-fsl-sage, not of fsl-sage and cse-fsl"
        in capsys.readouterr().err
    )


def test_report_without_a_run_ends_with_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["report", str(tmp_path)])
    assert left.value.code == 2
    assert "There is no run to report" in capsys.readouterr().err

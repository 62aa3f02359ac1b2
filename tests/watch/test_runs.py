"""What is known of a run from its files alone, whatever state they are in."""

import json
import os
import time
from pathlib import Path

import pytest

from fsl_sage.records.planned import save_plan
from fsl_sage.watch import growing
from fsl_sage.watch.watched_run import SILENCE
from tests.watch.made_up import NOBODY, Looks, go_on, played, run_of


def test_a_run_that_goes_on_is_read_round_by_round(tmp_path: Path) -> None:
    path = played(run_of(tmp_path / "a", rounds=3))
    watched = Looks(tmp_path)
    run = watched.runs()["a"]
    assert (run["state"], run["rounds"], run["title"]) == ("running", 3, "FSL-SAGE")
    assert run["activity"]["workers"][0]["doing"] == "training client 2 of 3"
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert run["last"]["bytes_paper"] == lines[-1]["bytes_paper"]
    assert run["best"] == max(line["test_accuracy"] for line in lines)
    first, _, last = (line["elapsed_seconds"] for line in lines)
    assert run["left"] == pytest.approx((last - first) * 9 / 2)
    go_on(path, 2)
    assert watched.runs()["a"]["rounds"] == 5
    rounds = watched.rounds(run["number"], 3)
    assert [line["round"] for line in rounds["rounds"]] == [3, 4]


def test_the_bytes_are_those_of_the_ledger(tmp_path: Path) -> None:
    path = run_of(tmp_path / "a")
    rows = [line.split(",") for line in (path / "ledger.csv").read_text().splitlines()[1:]]
    for each in Looks(tmp_path).runs()["a"]["bytes"]:
        mine = [int(row[4]) for row in rows if (row[3], row[2]) == (each["kind"], each["direction"])]
        assert each["bytes"] == sum(mine)
        assert each["paper"] == (each["kind"] not in ("labels", "first download"))


def test_a_half_written_line_waits_for_its_end_and_a_damaged_one_is_counted(tmp_path: Path) -> None:
    path = run_of(tmp_path / "a", rounds=2)
    watched = Looks(tmp_path)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"round": 2, "test_acc')
        file.flush()
        assert (watched.runs()["a"]["rounds"], watched.runs()["a"]["damaged"]) == (2, 0)
        file.write('uracy": 0.5}\n{"round": "x"}\nnothing\n[1]\n{"round": 3, "test_accuracy": NaN, "seconds": 1e999}\n')
    run = watched.runs()["a"]
    assert (run["rounds"], run["damaged"]) == (4, 3)
    assert run["last"]["test_accuracy"] is None
    json.dumps(watched.state(), allow_nan=False)


def test_lines_without_end_and_files_larger_than_a_look_are_read_in_pieces(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(growing, "CHUNK", 100)
    path = run_of(tmp_path / "a", rounds=2)
    watched = Looks(tmp_path)
    for _ in range(40):
        run = watched.runs()["a"]
    assert (run["rounds"], run["damaged"]) == (2, 0)
    monkeypatch.setattr(growing, "CHUNK", 2**22)
    with open(path / "metrics.jsonl", "a") as file:
        file.write("x" * (growing.LONGEST + 2) + "\n")
    assert watched.runs()["a"]["damaged"] >= 1


def test_a_resume_that_cuts_the_rounds_back_begins_anew(tmp_path: Path) -> None:
    path = run_of(tmp_path / "a", rounds=5)
    watched = Looks(tmp_path)
    before = watched.runs()["a"]
    kept = "".join((path / "metrics.jsonl").read_text().splitlines(keepends=True)[:2])
    (tmp_path / "kept").write_text(kept)
    os.replace(tmp_path / "kept", path / "metrics.jsonl")
    after = watched.runs()["a"]
    assert (before["rounds"], after["rounds"]) == (5, 2)
    assert after["generation"] > before["generation"]


def test_states(tmp_path: Path) -> None:
    run_of(tmp_path / "finished", finished=True)
    played(run_of(tmp_path / "running", rounds=2))
    played(run_of(tmp_path / "killed", rounds=2), NOBODY)
    run_of(tmp_path / "stopped", rounds=2)
    (run_of(tmp_path / "failed", rounds=2) / "failure.txt").write_text("The loss became NaN.\n")
    (run_of(tmp_path / "damaged") / "config.json").write_text('{"config": ')
    (run_of(tmp_path / "emptied") / "config.json").write_text("{}")
    runs = Looks(tmp_path).runs()
    assert {name: run["state"] for name, run in runs.items()} == {
        "finished": "finished",
        "running": "running",
        "killed": "stopped",
        "stopped": "stopped",
        "failed": "failed",
        "damaged": "damaged",
        "emptied": "damaged",
    }
    assert runs["finished"]["reason"] == "all 12 rounds played"
    assert runs["failed"]["reason"] == "The loss became NaN."
    assert runs["failed"]["resume"] == f"fsl-sage resume {tmp_path / 'failed'}"
    assert runs["killed"]["activity"] is None


def test_a_run_on_another_machine_goes_on_while_it_writes(tmp_path: Path) -> None:
    path = played(run_of(tmp_path / "a", rounds=2), machine="elsewhere")
    assert Looks(tmp_path).runs()["a"]["state"] == "running"
    for file in path.iterdir():
        os.utime(file, (time.time() - 2 * SILENCE,) * 2)
    assert Looks(tmp_path).runs()["a"]["state"] == "stopped"


def test_runs_appear_and_vanish(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    watched = Looks(folder)
    assert watched.state()["exists"] is False
    run_of(folder / "deep" / "a")
    first = watched.runs()["deep/a"]["number"]
    run_of(folder / "b")
    assert {*watched.runs()} == {"deep/a", "b"}
    for file in (folder / "deep" / "a").iterdir():
        file.unlink()
    assert {*watched.runs()} == {"b"}
    assert watched.rounds(first, 0) is None


def test_one_run_is_watched_by_its_own_directory(tmp_path: Path) -> None:
    run_of(tmp_path / "a")
    assert {*Looks(tmp_path / "a").runs()} == {"a"}


def test_a_comparison_tells_which_runs_wait(tmp_path: Path) -> None:
    played(run_of(tmp_path / "a", rounds=2))
    run_of(tmp_path / "b", rounds=2)
    save_plan(tmp_path, {"a": 12, "b": 12, "c": 7}, at_once=2)
    state = Looks(tmp_path).state()
    assert (state["comparison"], state["at_once"]) == (True, 2)
    assert state["waiting"] == [{"name": "c", "rounds": 7}]
    assert [run["state"] for run in state["runs"]] == ["running", "waiting"]
    plan = json.loads((tmp_path / "comparison.json").read_text())
    (tmp_path / "comparison.json").write_text(json.dumps({**plan, "process": NOBODY}))
    state = Looks(tmp_path).state()
    assert (state["comparison"], state["waiting"]) == (False, [])
    assert [run["state"] for run in state["runs"]] == ["running", "stopped"]


@pytest.mark.parametrize("plan", ["[]", '{"process": 1, "machine": 3, "runs": 5}', '{"runs": [1, {}]}', "\x00"])
def test_a_damaged_plan_is_as_good_as_none(tmp_path: Path, plan: str) -> None:
    (tmp_path / "comparison.json").write_text(plan)
    run_of(tmp_path / "a")
    assert len(Looks(tmp_path).state()["runs"]) == 1


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    outside = run_of(tmp_path / "outside")
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "linked").symlink_to(outside)
    (folder / "half").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (folder / "half" / name).symlink_to(outside / name)
    (folder / "real").mkdir()
    (folder / "real" / "config.json").write_bytes((outside / "config.json").read_bytes())
    for name in ("metrics.jsonl", "ledger.csv", "failure.txt", "result.json", "activity.json"):
        (folder / "real" / name).symlink_to(outside / "metrics.jsonl")
    runs = Looks(folder).runs()
    assert {*runs} == {"real"}
    assert (runs["real"]["rounds"], runs["real"]["bytes"], runs["real"]["state"]) == (0, [], "stopped")


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    path = run_of(tmp_path / "a")
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    assert Looks(tmp_path).runs()["a"]["rounds"] == 0


def test_nothing_is_written_and_no_lock_is_taken(tmp_path: Path) -> None:
    played(run_of(tmp_path / "a", rounds=3))

    def everything() -> dict[str, tuple[int, bytes]]:
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}

    before = everything()
    Looks(tmp_path).state()
    assert everything() == before


def test_the_command_for_a_first_run_writes_into_the_watched_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Looks(Path("not/there")).state()["first"] == str(tmp_path / "not" / "there" / "first")
    assert Looks(Path("my runs")).state()["first"] == f"'{tmp_path / 'my runs' / 'first'}'"


def test_the_first_round_does_not_count_for_the_time_left(tmp_path: Path) -> None:
    path = played(run_of(tmp_path / "a", rounds=3))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line, elapsed in zip(lines, (60.0, 62.0, 64.0), strict=True):
        line["elapsed_seconds"] = elapsed
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Looks(tmp_path).runs()["a"]["left"] == 9 * 2.0


def test_a_failure_without_a_full_stop_gets_one(tmp_path: Path) -> None:
    for name, said in (("a", "mine.py, line 11)"), ("b", "The loss became nan.")):
        (run_of(tmp_path / name) / "failure.txt").write_text(said)
    reasons = {name: run["reason"] for name, run in Looks(tmp_path).runs().items()}
    assert reasons == {"a": "mine.py, line 11).", "b": "The loss became nan."}

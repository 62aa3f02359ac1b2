"""The page in a real browser: it follows runs, and whatever their files hold stays text."""

import itertools
import json
import re
from pathlib import Path

import pytest

from fsl_sage import run
from fsl_sage.records.planned import save_plan
from fsl_sage.records.trackers import Tracker
from fsl_sage.wire import message
from tests.report.browser import chromium
from tests.report.test_page import needs_chromium
from tests.watch.made_up import go_on, played, run_of, served


def texts(page, selector):
    return page.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")


def points(page, chart):
    """How many points each curve of a chart has."""
    path = f'[data-chart="{chart}"] .curve'
    return page.value(
        f"[...document.querySelectorAll({json.dumps(path)})].map((one) => one.getAttribute('d').split('L').length)"
    )


@needs_chromium
def test_several_runs_are_shown_side_by_side_and_followed(tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    going = played(run_of(folder / "fsl-sage_iid_seed1", rounds=4))
    run_of(folder / "fedavg_iid_seed1", "fedavg", finished=True)
    failed = run_of(folder / "cse-fsl_iid_seed1", "cse-fsl", rounds=2)
    (failed / "failure.txt").write_text("The test loss became nan.")
    save_plan(folder, {"fsl-sage_iid_seed1": 12, "fedavg_iid_seed1": 12, "sl_iid_seed1": 12}, at_once=1)
    with served(folder) as server, chromium(tmp_path / "profile") as page:
        page.size(1280, 900)
        page.open(server.address)
        page.until("document.querySelectorAll('.run[data-run]').length === 3")
        assert "4 runs: 1 running, 1 failed, 1 waiting, 1 finished" in texts(page, "#lead")
        assert sorted(points(page, "test_accuracy")) == [2, 4, 12]
        assert sorted(points(page, "fidelity_cosine")) == [2, 4], "FedAvg has no fidelity"
        assert "training client 2 of 3" in texts(page, ".lane")[0]
        assert any("The test loss became nan." in note for note in texts(page, ".note"))
        assert texts(page, ".tile .big")[0] == "1 of 4"
        assert texts(page, ".tile .more")[1].startswith("until about")
        assert len(texts(page, "#moved .row")) == 3

        go_on(going, 3)
        page.until("document.querySelector('[data-state=running] dd')?.textContent === '7 / 12'")
        assert sorted(points(page, "test_accuracy")) == [2, 7, 12]

        first = page.value("document.querySelector('[data-chart=test_accuracy] .curve').getAttribute('d')")
        page.click('button[data-axis="gib"]')
        page.until(f"document.querySelector('[data-chart=test_accuracy] .curve').getAttribute('d') !== {first!r}")
        assert "communication, GiB" in texts(page, "[data-chart=test_accuracy] text")
        page.click("#legend button")
        page.until("document.querySelectorAll('[data-chart=test_accuracy] .curve').length === 2")
        page.click("#legend button")

        box = page.value(
            "(({x, y, width}) => [x + width / 2, y + 80])(document.querySelector('.chart svg').getBoundingClientRect())"
        )
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        page.until("!document.querySelector('.chart .tip').hidden")
        assert any("fedavg_iid_seed1" in tip for tip in texts(page, ".tip div"))

        for file in failed.iterdir():
            file.unlink()
        run_of(folder / "sl_iid_seed1", "splitfed-ss", rounds=3)
        page.until("document.body.textContent.includes('SplitFed-SS')")
        page.until("!document.body.textContent.includes('cse-fsl_iid_seed1')")

        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.size(400, 800)
            page.until("document.documentElement.scrollWidth <= 400")
        loaded = page.value("performance.getEntriesByType('resource').map((one) => new URL(one.name).host)")
        assert {*loaded} == {f"127.0.0.1:{server.server_port}"}, "nothing comes from elsewhere"
        assert page.problems == []


@needs_chromium
def test_whatever_files_hold_stays_text(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=document.title=1>"
    folder = tmp_path / "many"
    path = played(run_of(folder / hostile, rounds=2))
    written = json.loads((path / "config.json").read_text())
    written["config"]["model"]["name"] = hostile
    written["score"] = {"name": "</script><script>document.title=2</script>", "percent": False}
    (path / "config.json").write_text(json.dumps(written))
    (path / "activity.json").write_text(json.dumps({"doing": hostile, "workers": [{"name": hostile, "since": "x"}]}))
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"round": 2, "test_accuracy": "<b>", "bytes_paper": 1e400, "missing": [1]}\n{"rou')
    run_of(folder / "other", rounds=1)
    with served(folder) as server, chromium(tmp_path / "profile") as page:
        page.open(server.address)
        page.until("document.querySelectorAll('.run[data-run]').length === 2")
        assert any(hostile in text for text in texts(page, ".run .name"))
        assert page.value("document.querySelectorAll('img, script').length") == 1
        assert "fsl-sage watch" in page.value("document.title")
        assert page.problems == []


@pytest.mark.slow
@needs_chromium
def test_a_real_run_is_followed_from_before_its_start_to_its_end(tiny, tmp_path: Path) -> None:
    config = tiny(rounds=3)
    seen = []

    class Looks(Tracker):
        """Looks at the page after every round; the next begins when that shows this one."""

        def round(self, metrics) -> None:
            done = metrics["round"] + 1
            page.until(f"document.querySelector('.tile .big')?.textContent === '{done} of 3'")
            seen.append((texts(page, "#live")[0], texts(page, ".lane"), points(page, "test_accuracy")))

    with served(config.out) as server, chromium(tmp_path / "profile") as page:
        page.open(server.address)
        page.until("document.querySelector('#live').textContent === 'waiting for a run'")
        result = run(config, [Looks()])
        page.until("document.querySelector('#live').textContent === 'nothing runs at the moment'")
        page.until("document.body.textContent.includes('all 3 rounds played')")
        assert [live for live, _, _ in seen] == ["live"] * 3
        assert [lanes for _, lanes, _ in seen if not lanes] == []
        assert [found for _, _, found in seen] == [[1], [2], [3]]
        assert f"{result.metrics[-1]['test_accuracy'] * 100:.2f} %" in texts(page, ".tile .big")
        assert page.problems == []


@needs_chromium
def test_runs_side_by_side_that_nobody_planned_end_with_the_last_of_them(tmp_path: Path) -> None:
    """The time left is that of the run that takes longest, not of one after the other."""
    for name in ("a", "b"):
        played(run_of(tmp_path / "runs" / name, rounds=4))
    with served(tmp_path / "runs") as server, chromium(tmp_path / "profile") as page:
        page.open(server.address)
        page.until("document.querySelectorAll('.run[data-run]').length === 2")
        page.until("document.querySelectorAll('.tile .more')[1]?.textContent.startsWith('until about')")
        assert texts(page, ".tile .big")[1] in texts(page, ".run dd")


KINDS = sorted(value for name, value in vars(message).items() if name.isupper() and isinstance(value, str))


@needs_chromium
def test_every_kind_of_bytes_has_its_own_colour(tmp_path: Path) -> None:
    path = run_of(tmp_path / "runs" / "a", rounds=2)
    hostile = ["constructor"]
    with open(path / "ledger.csv", "a") as file:
        file.writelines(f"0,0,up,{kind},1000000\n" for kind in [*KINDS, *hostile])
    with served(tmp_path / "runs") as server, chromium(tmp_path / "profile") as page:
        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.open(server.address)
            page.until("document.querySelectorAll('.kinds i').length > 0")
            assert sorted(texts(page, ".kinds span")) == sorted([*KINDS, *hostile])
            shown = page.value("[...document.querySelectorAll('.kinds i')].map((one) => one.style.background)")
            colours = [[int(part) for part in re.findall(r"\d+", each)] for each in shown]
            apart = [sum(map(abs, map(int.__sub__, a, b))) for a, b in itertools.combinations(colours, 2)]
            assert min(apart) > 40, "two kinds can hardly be told apart"
        assert "everything, labels and first download included" in texts(page, "#moved .lead")
        assert page.problems == []

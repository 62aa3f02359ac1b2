"""Every example runs as it stands."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

FOLDER = Path(__file__).parents[2] / "examples"
QUICK = ("own_model", "own_data", "own_algorithm")
OWN_PROCESSES = ("sweep", "federation")
LINES = 40


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder of its own; the example's folder is where Python looks first, as when a script is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield tmp_path
    for name in (*QUICK, *OWN_PROCESSES):
        sys.modules.pop(name, None)


def test_every_example_is_short_and_in_the_list():
    scripts = {file.stem for file in FOLDER.glob("*.py")}
    assert scripts == {*QUICK, *OWN_PROCESSES}
    listed = (FOLDER / "README.md").read_text()
    for name in scripts:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < LINES, name
        assert f"[{name}.py]({name}.py)" in listed


@pytest.mark.parametrize("name", QUICK)
def test_a_script_runs(elsewhere, capsys, name):
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"\d", said)
    assert list(elsewhere.glob("runs/*/result.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep", pytest.param("federation", marks=pytest.mark.xdist_group("flower"))])
def test_a_script_that_starts_processes_runs(elsewhere, name):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    if name == "sweep":
        assert done.stdout.count(" bytes") == 4
        assert (elsewhere / "runs/sweep/report/report.html").exists()
    else:
        assert json.loads(done.stdout)["rounds"] == 2


def cells_of(notebook):
    """The code of each cell. A notebook is JSON: to run its cells takes no more than this."""
    found = json.loads(notebook.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.drawn
def test_the_notebook_runs_from_its_first_cell_to_its_last(elsewhere, capsys, monkeypatch):
    matplotlib.use("agg")
    names = {"__name__": "__main__"}
    cells = cells_of(FOLDER / "quickstart.ipynb")
    assert len(cells) == 5
    for cell in cells:
        assert not re.search(r"^\s*[%!]", cell, re.MULTILINE), "plain Python, so that any executor runs it"
        exec(compile(cell, "quickstart.ipynb", "exec"), names)
    said = capsys.readouterr().out
    moved = names["result"].metrics
    aligning = names["costs"]["fsl-sage"]["bytes_paper_aligning"]
    assert moved[0]["bytes_paper"] == aligning, "the first round is one that aligns"
    assert moved[1]["bytes_paper"] - aligning == names["costs"]["fsl-sage"]["bytes_paper"]
    assert f"tested once more: {moved[-1]['test_accuracy']:.1%}" in said
    names["plt"].close("all")


def test_the_notebook_on_the_page_shows_what_its_cells_give():
    """The stored outputs are those of the cells in order, without an error, and without a path of some machine."""
    found = json.loads((FOLDER / "quickstart.ipynb").read_text())
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    for cell in code:
        assert {each["output_type"] for each in cell["outputs"]} <= {"stream", "display_data"}
        assert "/home/" not in json.dumps(cell["outputs"])
        assert "/root/" not in json.dumps(cell["outputs"])

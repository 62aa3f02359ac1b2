"""A stranger's algorithm: CONTRIBUTING.md's example, in a file outside the package, does all that the page promises."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fsl_sage
from fsl_sage.config import from_dict
from fsl_sage.experiment import run
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from tests import processes
from tests.conftest import TINY

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.partition("  #")[0] for line in PAGE.splitlines() if re.match("fsl-sage .* anchored:", line)]
NAME = "anchored:Anchored"
SMALL = [
    "--clients", "3", "--rounds", "2", "--batch-size", "16", "--device", "cpu", "--workers", "2",
    "--model.name", "small-cnn", "--data.train-images", "150", "--data.test-images", "100",
]  # fmt: skip
TIMES = ("seconds", "elapsed_seconds")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the file, which is the current one; the file is imported anew."""
    (tmp_path / "anchored.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("anchored", None)


def command(*words):
    """A command in a process of its own. Like the installed script, it does not have this folder on its path."""
    assert not {"", str(Path.cwd())} & {*sys.path}
    done = processes.command(*words, env={"PYTHONSAFEPATH": "1"})
    assert "Traceback" not in done.stderr, done.stderr
    return done


def here(**changes):
    """The same run in this process."""
    values = {**TINY, "algorithm": NAME, **changes}
    return from_dict({name: value for name, value in values.items() if name not in ("upload_every", "align_every")})


def assert_same_run(a, b):
    first, second = (load_tensors(path / "model.safetensors")[0] for path in (a, b))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (a / "ledger.csv").read_bytes() == (b / "ledger.csv").read_bytes()
    lines = [[{k: v for k, v in line.items() if k not in TIMES} for line in RunDirectory(x).metrics()] for x in (a, b)]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_the_page_is_short_and_its_commands_run(folder):
    assert len(CODE.splitlines()) < 60
    assert [words.split()[1] for words in COMMANDS] == ["run", "run", "cost", "compare"]
    for words in COMMANDS:
        # The page's own come last: of an option that is given twice the last counts.
        name, *given = shlex.split(words)[1:]
        done = command(name, *SMALL, *given)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "runs/anchored/config.json").read_text())["config"]["mu"] == 0.1
    assert {path.name for path in (folder / "runs/both").iterdir() if path.is_dir()} == {
        "anchored-Anchored_iid_seed0_mu0",
        "anchored-Anchored_iid_seed0_mu0.1",
        "fedavg_iid_seed0",
        "report",
    }
    table = (folder / "runs/both/report/tables/best-accuracy.md").read_text()
    assert "mu 0.1" in table
    assert "Anchored FedAvg" in table
    # The law that the page names: without its term it is FedAvg.
    assert_same_weights(folder / "runs/both/anchored-Anchored_iid_seed0_mu0", folder / "runs/both/fedavg_iid_seed0")


def assert_same_weights(a, b):
    first, second = (load_tensors(path / "model.safetensors")[0] for path in (a, b))
    assert all(torch.equal(first[name], second[name]) for name in first)


IN_THE_PACKAGE = """
import io, json, sys
from contextlib import redirect_stdout
from fsl_sage import cost
from fsl_sage.algorithms.looks import title_of
from fsl_sage.cli import commands
from fsl_sage.config import from_dict
from fsl_sage.experiment import run

said = io.StringIO()
with redirect_stdout(said):
    try:
        commands.run_command(["--algorithm", "anchored", "--help"])
    except SystemExit:
        pass
values = json.loads(sys.argv[1])
results = [run(from_dict({**values, **more})) for more in ({"algorithm": "anchored", "mu": 0}, {"algorithm": "fedavg"})]
costs = cost(results[1].config, algorithms=("anchored", "fedavg"))
shown = {"help": said.getvalue(), "title": title_of("anchored"), "costs": costs}
print(json.dumps({**shown, "runs": [str(result.directory) for result in results]}))
"""


@pytest.mark.slow
def test_as_a_file_of_the_package_it_has_a_name(tmp_path):
    """One file more in the folder of algorithms, and nothing else: there is `--algorithm anchored` everywhere."""
    package = tmp_path / "site" / "fsl_sage"
    shutil.copytree(Path(fsl_sage.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "algorithms" / "anchored.py").write_text(CODE)
    values = {**TINY, "rounds": 1}
    given = json.dumps({name: values[name] for name in values.keys() - {"upload_every", "align_every"}})
    env = {**os.environ, "PYTHONPATH": str(package.parent), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_PACKAGE, given], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "--mu FLOAT" in found["help"]
    assert "fedavg, adaptsfl, anchored, cpsl" in " ".join(found["help"].replace("│", "").split())
    assert found["title"] == "Anchored FedAvg"
    assert found["costs"]["anchored"] == found["costs"]["fedavg"]
    assert_same_weights(*map(tmp_path.joinpath, found["runs"]))


@pytest.mark.slow
def test_help_and_cost_know_it(folder):
    said = " ".join(command("run", "--algorithm", NAME, "--help").stdout.split())
    assert "--mu FLOAT" in said
    assert "How strongly the clients are held" in said
    assert "--align-every" not in said
    costs = json.loads(command("cost", "--algorithm", NAME, "--json", *SMALL).stdout)
    assert costs[NAME] == costs["fedavg"]


def test_an_option_that_it_does_not_have_is_refused(folder):
    done = command("run", "--algorithm", NAME, "--align-every", "2", *SMALL)
    assert done.returncode == 2
    assert f"--align-every is an option of fsl-sage and lazy-fsl-sage, not of {NAME}" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_toml_file_names_it_with_its_option(folder):
    (folder / "mine.toml").write_text(f'algorithm = "{NAME}"\nmu = 0.5\n')
    assert command("run", "mine.toml", *SMALL, "--out", "one").returncode == 0
    assert command("run", "mine.toml", *SMALL, "--mu", "0.5", "--out", "two").returncode == 0
    one, two = (json.loads((folder / name / "config.json").read_text()) for name in ("one", "two"))
    assert one["digest"] == two["digest"]
    assert one["config"]["mu"] == 0.5


@pytest.mark.slow
def test_it_resumes_in_a_new_process(folder):
    words = ["--algorithm", NAME, "--mu", "0.1", *SMALL, "--rounds", "5"]
    assert command("run", *words, "--out", "whole").returncode == 0
    with processes.Started("run", *words, "--out", "killed") as process:
        while not (folder / "killed" / "checkpoint.safetensors").exists():
            assert process.runs(), "it ended before it could be killed"
            time.sleep(0.005)
        process.kill()
    assert not (folder / "killed" / "result.json").exists()
    done = command("resume", "killed")
    assert done.returncode == 0, done.stderr
    assert_same_run(folder / "killed", folder / "whole")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_it_runs_on_ray(folder):
    pytest.importorskip("ray")
    words = ["--algorithm", NAME, "--mu", "0.1", *SMALL]
    done = command("run", *words, "--engine", "ray", "--out", "ray")
    assert done.returncode == 0, done.stderr
    assert command("run", *words, "--out", "local").returncode == 0
    assert_same_run(folder / "ray", folder / "local")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_it_is_compared_on_ray(folder):
    pytest.importorskip("ray")
    done = command("compare", "--algorithms", NAME, "fedavg", "--engine", "ray", *SMALL, "--out", "both")
    assert done.returncode == 0, done.stderr
    assert (folder / "both" / "anchored-Anchored_iid_seed0" / "result.json").exists()


@pytest.mark.slow
def test_it_runs_on_flower(folder, monkeypatch):
    """The app brings the file: server and sites find it there and nowhere else."""
    pytest.importorskip("flwr")
    from fsl_sage.deploy.client_app import make_client_app
    from fsl_sage.deploy.server_app import serve
    from tests.engines.flower_grid import InProcessGrid

    monkeypatch.setattr("fsl_sage.engines.flower.courier.POLL", 0.02)
    words = ["--algorithm", NAME, "--mu", "0.1", *SMALL]
    done = command("deploy", "init", "app", *words, "--sites", "sites")
    assert done.returncode == 0, done.stderr
    assert (folder / "app" / "anchored.py").read_text() == CODE
    assert command("run", *words, "--out", "local").returncode == 0
    (folder / "anchored.py").unlink()
    config = folder / "app" / "fsl_sage_app" / "config.json"
    grid = InProcessGrid(make_client_app(config))
    for client in range(3):
        grid.join(client, folder / "sites" / f"client-{client}.npz", folder / "states")
    options = {"data": "", "timeout": 60.0, "minimum": 1, "join-timeout": 1.0, "run-directory": str(folder / "run")}
    serve(config, grid, options)
    federated, local = folder / "run", folder / "local"
    assert (federated / "ledger.csv").read_bytes() == (local / "ledger.csv").read_bytes()
    assert_same_weights(federated, local)


def test_python_runs_it(folder):
    result = run(here(mu=0.1, out=str(folder / "run")))
    again = replace(result.config, options={"mu": 0.1}, out=folder / "two")
    assert_same_run(run(again).directory, result.directory)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:Anchored", "--algorithm nowhere:Anchored cannot be imported: No module named 'nowhere'"),
        ("anchored:Nothing", "--algorithm anchored:Nothing is not there: anchored has no Nothing"),
        ("anchored:AnchoredOptions", "is not an Algorithm: give a class that derives from fsl_sage.Algorithm"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(folder, name, said):
    done = command("run", "--algorithm", name, *SMALL)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())

"""The ServerApp: F-server and S-server of a run whose clients are at the nodes of a federation."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fsl_sage.algorithms import resolve
from fsl_sage.config import Config, digest
from fsl_sage.deploy.agreement import Agreement, read_agreement, what_leaves
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.flower.engine import FlowerEngine, Rules
from fsl_sage.engines.flower.inspection import Inspector
from fsl_sage.engines.process import peak_memory
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, Result, play
from fsl_sage.experiment.setup import check_structure, make_dry_setup, make_setup
from fsl_sage.problems.base import Problem
from fsl_sage.problems.sites import problem_at_server, shapes_at_sites
from fsl_sage.reading import read_json
from fsl_sage.records.files import write_json
from fsl_sage.records.plain_lines import PlainLines
from fsl_sage.records.run_directory import RunDirectory

RUN_FILE = "federation.json"
"""The file in the run directory with the id under which nodes keep their states, and with what leaves a site."""


def make_server_app(config_file: Path) -> ServerApp:
    """The ServerApp of an app whose configuration and agreement are in `config_file`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(config_file, grid, context.run_config)

    return app


def serve(config_file: Path, grid: Grid, options: Mapping[str, Any]) -> Result:
    """Train with the nodes of the grid; an interrupted run in the run directory is resumed."""
    config, agreement = read_agreement(config_file)
    data = replace(config.data, name=options["data"] or config.data.name)
    out = Path(options["run-directory"]).expanduser()
    config = replace(config, data=data, out=out)
    rules = Rules(float(options["timeout"]), int(options["minimum"]), float(options["join-timeout"]))
    # The server has only the test examples. Of the clients' examples it knows how many there are.
    problem = problem_at_server(config, agreement)
    directory = RunDirectory(out)
    with directory.held():
        return _serve(directory, config, agreement, problem, grid, rules)


def _serve(
    directory: RunDirectory, config: Config, agreement: Agreement, problem: Problem, grid: Grid, rules: Rules
) -> Result:
    setup = make_setup(config, problem, agreement.examples)
    leaves = what_leaves(config, setup.settings.task.labels_are)
    _open(directory, config, leaves)
    print(leaves)
    shapes = shapes_at_sites(problem, agreement, sum(agreement.examples))
    dry = DryEngine(make_dry_setup(config, shapes, agreement.examples))
    check_structure(setup, dry.setup)
    inspector = Inspector(_run_id(directory), dry, setup.settings.device)
    engine = FlowerEngine(setup, grid, inspector, rules)
    federation = Federation(setup, engine)
    result = play(directory, config, [PlainLines()], problem, lambda *_: federation)
    engine.finish(len(result.metrics), federation.delivery(federation.post.waiting))
    about = read_json(directory.path / RUN_FILE)
    write_json(directory.path / RUN_FILE, {**about, "server_peak_memory_bytes": peak_memory()})
    return result


def _open(directory: RunDirectory, config: Config, leaves: str) -> None:
    """Begin a new run in the directory, or check that the one in it can be resumed."""
    if not directory.config_file.exists():
        directory.begin(config)
        write_json(directory.path / RUN_FILE, {"run": uuid4().hex, "what_leaves_a_site": leaves})
    if directory.finished():
        raise InputError(f"{directory.path} is finished: give another run-directory for a new run.")
    if digest(resolve(directory.config())) != digest(config):
        raise InputError(f"{directory.path} holds a run of another configuration: give another run-directory.")


def _run_id(directory: RunDirectory) -> str:
    try:
        return str(read_json(directory.path / RUN_FILE)["run"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{directory.path} does not hold a run on Flower: its {RUN_FILE} is not there.") from None

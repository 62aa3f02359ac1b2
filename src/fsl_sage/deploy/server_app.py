"""The ServerApp: F-server and S-server of a run whose clients are at the nodes of a federation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fsl_sage.algorithms import resolve
from fsl_sage.config import Config, digest
from fsl_sage.deploy.agreement import Agreement, read_agreement, what_leaves
from fsl_sage.engines.base import Delivery
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
"""The file in the run directory with the id under which nodes keep their states, with what leaves a site, and in the
end with a note that the sites have the final weights."""
TOLD = "sites_told"
"""The name of that note."""


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
    with _taken_away_if_refused(directory):
        shapes = shapes_at_sites(problem, agreement, sum(agreement.examples))
        dry = DryEngine(make_dry_setup(config, shapes, agreement.examples))
        check_structure(setup, dry.setup)
        inspector = Inspector(_about(directory)["run"], dry, setup.settings.device)
        engine = FlowerEngine(setup, grid, inspector, rules)
        federation = Federation(setup, engine)
        result = _played(directory, config, problem, federation)
    _tell_sites(directory, config, engine, len(result.metrics), federation.delivery(federation.post.waiting))
    return result


def _played(directory: RunDirectory, config: Config, problem: Problem, federation: Federation) -> Result:
    """Play the run to its end; of a finished one, whose sites do not know that yet, bring back the last state."""
    if not directory.finished():
        # The checkpoint of the last round stays until the sites are told: from it that can be done again.
        kept = replace(config, keep_checkpoint=True)
        return replace(play(directory, kept, [PlainLines()], problem, lambda *_: federation), config=config)
    federation.engine.close()  # nothing is trained or evaluated any more
    checkpoint = directory.load_checkpoint(config)
    assert checkpoint is not None, "without one the run is over"
    federation.load_checkpoint(*checkpoint)
    stopped = str((directory.result() or {}).get("stopped"))
    return Result(directory.path, config, directory.metrics(), stopped, problem.score)


def _tell_sites(directory: RunDirectory, config: Config, engine: FlowerEngine, rounds: int, delivery: Delivery) -> None:
    """Bring the sites the final weights. When one has them, the run is over."""
    about = {**_about(directory), "server_peak_memory_bytes": peak_memory()}
    if engine.finish(rounds, delivery):
        about[TOLD] = True
        if not config.keep_checkpoint:
            directory.checkpoint_file.unlink(missing_ok=True)
    else:
        print("No site got the final weights: bring them by the same 'flwr run' when the sites are connected.")
    write_json(directory.path / RUN_FILE, about)


def _open(directory: RunDirectory, config: Config, leaves: str) -> None:
    """Begin a new run in the directory, or check that the one in it can be resumed."""
    begins = not directory.config_file.exists()
    if begins:
        directory.begin(config)
    if _is_over(directory):
        raise InputError(f"{directory.path} is finished: give another run-directory for a new run.")
    if digest(resolve(directory.config())) != digest(config):
        raise InputError(f"{directory.path} holds a run of another configuration: give another run-directory.")
    if begins or _has_no_id_yet(directory):
        write_json(directory.path / RUN_FILE, {"run": uuid4().hex, "what_leaves_a_site": leaves})


def _is_over(directory: RunDirectory) -> bool:
    """Whether the run is finished, and the sites know that. Without a checkpoint they cannot be told any more."""
    return directory.finished() and (not directory.checkpoint_file.exists() or bool(_about(directory).get(TOLD)))


def _has_no_id_yet(directory: RunDirectory) -> bool:
    """Whether the server was killed when it had written the configuration of a new run, and no more."""
    begun = _is_unplayed(directory) and directory.config().engine == "flower"
    return begun and not (directory.path / RUN_FILE).exists()


def _is_unplayed(directory: RunDirectory) -> bool:
    return not directory.metrics() and not directory.checkpoint_file.exists()


@contextmanager
def _taken_away_if_refused(directory: RunDirectory) -> Iterator[None]:
    """Take a run away that cannot even start, so that the corrected app may use the same directory."""
    unplayed = _is_unplayed(directory)
    try:
        yield
    except InputError:
        if unplayed and not directory.metrics():
            (directory.path / RUN_FILE).unlink(missing_ok=True)
            directory.abandon()
        raise


def _about(directory: RunDirectory) -> dict[str, Any]:
    """What the run directory says of the run on Flower: its id, and whether the sites have the final weights."""
    try:
        about = dict(read_json(directory.path / RUN_FILE))
        return {**about, "run": str(about["run"])}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{directory.path} does not hold a run on Flower: its {RUN_FILE} is not there.") from None

"""What `fsl-sage deploy` does."""

import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from fsl_sage.algorithms import make_algorithm
from fsl_sage.config import Config
from fsl_sage.deploy.agreement import agreed_on
from fsl_sage.deploy.app import agree, write_app, write_sites
from fsl_sage.deploy.demo import demo
from fsl_sage.deploy.language_demo import language_demo
from fsl_sage.errors import InputError
from fsl_sage.problems.make import make_dry_problem
from fsl_sage.problems.texts.one_side import export_side
from fsl_sage.problems.texts.problem import TextProblem
from fsl_sage.problems.texts.sources import kind_of_texts
from fsl_sage.problems.texts.texts import TextSizes


def init(
    console: Console,
    directory: Path,
    config: Config,
    examples: tuple[int, ...] | None = None,
    sites: Path | None = None,
) -> None:
    """Write an app, and with --sites the sites' data; print the next steps."""
    if examples and sites:
        raise InputError(
            "--sites divides a data set among the sites, --examples says that they have their own: give one."
        )
    agreement, shares = agree(config, examples)
    write_app(directory, config, agreement)
    console.print(f"The app is in {directory}; what server and sites agree on is in its config.json.", soft_wrap=True)
    if sites is not None:
        paths = write_sites(sites, shares, agreement)
        console.print(f"The data of the sites are in {paths[0]} to {paths[-1].name}.", soft_wrap=True)
    for said in agreed_on(config, agreement):
        console.print(said, soft_wrap=True, highlight=False)
    console.print("Start it with 'flwr run' on a SuperLink that knows the nodes: docs/federation.md says how.")


def export(console: Console, directory: Path, config: Config, part: str) -> None:
    """Write the files of a model that one side needs."""
    if directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory} is not empty: give a new directory for the files.")
    algorithm = make_algorithm(config)
    held = {"client": algorithm.holds, "server": ("server", "auxiliary")}[part]
    prompts = kind_of_texts(config.data.name) == "prompts"
    sizes = TextSizes(1, 1, config.data.sequence_length)
    problem = TextProblem(None, sizes) if prompts else make_dry_problem(config)
    written = export_side(config, problem, held, directory)
    console.print(
        f"The weights of {' and '.join(held)}, {written / 1e6:,.1f} MB, are in {directory}: "
        f"""give it to the SuperNode by --node-config '… model="{directory}"'.""",
        soft_wrap=True,
        markup=False,
    )


def show_demo(console: Console, keep: Path | None, *, language: bool = False) -> None:
    """Run the demo. Stopping it stops all processes that it has started."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        (language_demo if language else demo)(console, keep)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)

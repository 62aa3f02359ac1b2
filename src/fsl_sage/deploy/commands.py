"""What `fsl-sage deploy` does."""

import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from fsl_sage.config import Config
from fsl_sage.deploy.app import agree, write_app, write_sites
from fsl_sage.deploy.demo import demo
from fsl_sage.errors import InputError


def init(
    console: Console,
    directory: Path,
    config: Config,
    examples: tuple[int, ...] | None = None,
    sites: Path | None = None,
) -> None:
    """Write an app, and the sites' data if they are asked for; say what comes next."""
    if examples and sites:
        raise InputError(
            "--sites divides a data set among the sites, --examples says that they have their own: give one."
        )
    agreement, shares = agree(config, examples)
    write_app(directory, config, agreement)
    console.print(f"The app is in {directory}; what server and sites agree on is in its config.json.", soft_wrap=True)
    if sites is not None:
        paths = write_sites(sites, shares, agreement)
        console.print(f"The images of the sites are in {paths[0]} to {paths[-1].name}.", soft_wrap=True)
    console.print("Start it with 'flwr run' on a SuperLink that knows the nodes: docs/federation.md says how.")


def show_demo(console: Console, keep: Path | None) -> None:
    """The demo; when it is stopped, so is all that it has started."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        demo(console, keep)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)

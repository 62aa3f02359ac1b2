"""The `fsl-sage` command: parses, calls, prints."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from rich.console import Console

from fsl_sage.config import Config, load_preset, preset_names
from fsl_sage.data import fetch
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import Result, cost, resume, run
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.terminal import Display, print_costs, print_summary

OUT = Console()
ERRORS = Console(stderr=True)

Flat = tyro.conf.arg(name="")


@dataclass(frozen=True)
class RunArguments:
    """Train, and write a run directory."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class CostArguments:
    """Print the bytes of a round by kind and direction for every algorithm, without training."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    json: bool = False
    """Print one JSON object keyed by algorithm."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class ResumeArguments:
    """Go on with an interrupted run from its last checkpoint."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run's directory."""
    workers: int | None = None
    """Clients that train side by side, where it should differ from before; never changes a number."""


@dataclass(frozen=True)
class DataArguments:
    """Get a data set ahead of time."""

    action: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="get")]
    """get"""
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """cifar10 or cifar100."""
    dir: Path | None = None
    """Where to keep it (else $FSL_SAGE_DATA, else the user's cache directory)."""


def run_command(args: Sequence[str]) -> None:
    """Train, and write a run directory."""
    config = _parse(RunArguments, "run", args).config
    _show(config, lambda display: run(config, [display]))


def resume_command(args: Sequence[str]) -> None:
    """Go on with an interrupted run, bit for bit."""
    arguments = tyro.cli(ResumeArguments, prog="fsl-sage resume", args=args)
    config = RunDirectory(arguments.directory).config()
    _show(config, lambda display: resume(arguments.directory, [display], arguments.workers))


def cost_command(args: Sequence[str]) -> None:
    """Print the bytes of a round for every algorithm, without training."""
    arguments = _parse(CostArguments, "cost", args)
    costs = cost(arguments.config)
    if arguments.json:
        print(json.dumps(costs, indent=2))
    else:
        print_costs(OUT, costs, arguments.config)


def data_command(args: Sequence[str]) -> None:
    """Get a data set ahead of time: fsl-sage data get NAME."""
    arguments = tyro.cli(DataArguments, prog="fsl-sage data", args=args)
    if arguments.action != "get":
        raise InputError(f"'fsl-sage data {arguments.action}' is not known: there is 'fsl-sage data get NAME'.")
    OUT.print(f"{arguments.name} is in {fetch(arguments.name, arguments.dir)}", highlight=False, soft_wrap=True)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "run": run_command,
    "resume": resume_command,
    "cost": cost_command,
    "data": data_command,
}


Arguments = TypeVar("Arguments", RunArguments, CostArguments)


def _parse(kind: type[Arguments], command: str, args: Sequence[str]) -> Arguments:
    """Options over a preset over the defaults."""
    source = _preset_of(args)
    default = kind() if source is None else kind(config=load_preset(source))
    return tyro.cli(kind, prog=f"fsl-sage {command}", default=default, args=args)


def _preset_of(args: Sequence[str]) -> str | None:
    """The preset that the arguments name, read before the options are parsed because it gives their defaults."""
    named = [args[place + 1] for place, word in enumerate(args[:-1]) if word == "--preset"]
    named += [word.removeprefix("--preset=") for word in args if word.startswith("--preset=")]
    named += [args[0]] if args and not args[0].startswith("-") else []
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} are several presets: give one.")
    if named and not args[0].startswith("-") and not named[0].endswith(".toml"):
        raise InputError(f"'{named[0]}' is not a TOML file; for a preset of the package give --preset {named[0]}.")
    return named[0] if named else None


def _show(config: Config, train: Callable[[Display], Result]) -> None:
    display = Display(OUT)
    try:
        result = train(display)
    except KeyboardInterrupt:
        display.stop()
        _leave(display)
    finally:
        display.stop()
    print_summary(OUT, result.directory, config, json.loads(RunDirectory(result.directory).result_file.read_text()))


def _leave(display: Display) -> None:
    """Leave at once: worker threads may be deep in a long local round."""
    if display.directory is not None:
        ERRORS.print(f"\nStopped. Go on with: fsl-sage resume {display.directory}", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    os._exit(130)


def _help() -> None:
    OUT.print("[bold]fsl-sage[/]: federated split learning, FSL-SAGE and the systems it is compared with.\n")
    OUT.print("usage: fsl-sage COMMAND [OPTIONS]      fsl-sage COMMAND --help explains a command's options\n")
    for name, command in COMMANDS.items():
        OUT.print(f"  [bold]{name:<8}[/] {(command.__doc__ or '').splitlines()[0]}", highlight=False)
    OUT.print(f"\npresets: {', '.join(preset_names())} (with --preset), or your own TOML file", highlight=False)


def main(args: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 a training that failed, 2 an impossible option or file, 130 interrupted."""
    args = sys.argv[1:] if args is None else list(args)
    if not args or args[0] in ("-h", "--help", "help"):
        _help()
        return
    try:
        if args[0] not in COMMANDS:
            raise InputError(f"'{args[0]}' is not a command: there are {', '.join(COMMANDS)}.")
        COMMANDS[args[0]](args[1:])
    except (InputError, TrainingError) as error:
        ERRORS.print(f"[bold red]fsl-sage:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, InputError) else 1)


if __name__ == "__main__":
    main()

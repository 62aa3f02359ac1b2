"""The `fsl-sage` command: parses, calls, prints."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape

from fsl_sage.config import Config, default_config, load_preset, option, preset_names
from fsl_sage.data import SMOLLM2, fetch
from fsl_sage.errors import InputError, MissingExtra, TrainingError
from fsl_sage.experiment import Result, cost, part_sizes, resume, run
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.compare import check_setups, costs_of_runs, locked, machines, prepare, raise_failures, run_grid
from fsl_sage.report.cuts import Limits, as_json, cuts_figure, parse_amount, print_cuts, rows
from fsl_sage.report.grid import Grid, for_algorithms, load_grid, parse_vary, plan_runs, refuse_overruled
from fsl_sage.report.progress import Progress, print_costs_of_grid, print_report
from fsl_sage.report.samples import (
    SHOWN,
    SampleOptions,
    make_samples,
    print_samples,
    print_scores,
    score_samples,
    write_samples,
)
from fsl_sage.report.terminal import Display, print_costs, print_summary
from fsl_sage.report.trained import masked_losses
from fsl_sage.report.write import ReportOptions, write_report

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
class CutsArguments:
    """Where to cut the model: every cut with its sizes, bytes, FLOPs and memory, and a recommendation."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    client_memory: str | None = None
    """The memory that a client has for training, such as 500MB or 2GiB."""
    uplink: str | None = None
    """The bytes that a client may send in a round, such as 20MB."""
    client_flops: str | None = None
    """The floating-point operations that a client can spend on a step, such as 8e9 or 8G."""
    figure: Path | None = None
    """Also draw the table, into this PNG file."""
    json: bool = False
    """Print one JSON object."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class CompareArguments:
    """Run every combination of algorithms, seeds and settings, and write a report; the same command goes on."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override; its table [compare] may hold the grid."""
    preset: str | None = None
    """A preset of the package that the options override."""
    algorithms: tuple[str, ...] = ()
    """The algorithms to compare."""
    seeds: tuple[int, ...] = ()
    """The seeds of each."""
    alpha: tuple[str, ...] = ()
    """Dirichlet parameters of the partition, or iid: --alpha iid 1 0.1"""
    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """OPTION=a,b,c: run with each value of an option, as in align_every=2,5,10; may be given several times."""
    jobs: int | None = None
    """Runs side by side (by the cores if not given); never changes a number."""
    dry_run: bool = False
    """Print the grid with the bytes of each run, and run nothing."""
    report: Annotated[ReportOptions, Flat] = field(default_factory=ReportOptions)
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class ReportArguments:
    """Write figures, tables and report.html from the run directories under a folder."""

    folder: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a folder with run directories in it."""
    out: Path | None = None
    """Where to write (FOLDER/report if not given)."""
    report: Annotated[ReportOptions, Flat] = field(default_factory=ReportOptions)


@dataclass(frozen=True)
class ResumeArguments:
    """Go on with an interrupted run from its last checkpoint."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run's directory."""
    workers: int | None = None
    """Clients that train side by side, where it should differ from before; never changes a number."""
    engine: Literal["local", "ray"] | None = None
    """The engine, where it should differ from before; never changes a number."""
    ray_address: str | None = None
    """The Ray cluster, where it should differ from before."""


@dataclass(frozen=True)
class DataArguments:
    """Get a data set or a language model ahead of time."""

    action: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="get")]
    """get"""
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """cifar10, cifar100, or smollm2-135m, a language model."""
    dir: Path | None = None
    """Where to keep it (else $FSL_SAGE_DATA, else the user's cache directory)."""


@dataclass(frozen=True)
class SamplesArguments:
    """Show what the language model of a finished run writes, beside what people wrote, and how that scores."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run's directory."""
    options: Annotated[SampleOptions, Flat] = field(default_factory=SampleOptions)


@dataclass(frozen=True)
class InitArguments:
    """Write a Flower app, for sites whose data stay where they are; 'flwr run' starts it."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    examples: tuple[int, ...] | None = None
    """The number of training images of each site; if not given, the data set's are divided among the sites."""
    sites: Path | None = None
    """Write each site's share of the data set there, to try a federation on one machine."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class DemoArguments:
    """A federation of three sites on this machine: TLS, authenticated nodes, three rounds, and a comparison."""

    keep: Path | None = None
    """Keep the app, the keys, the logs and the runs there."""


def run_command(args: Sequence[str]) -> None:
    """Train, and write a run directory."""
    config = _parse(RunArguments, "run", args).config
    _show(config, lambda display: run(config, [display]))


def resume_command(args: Sequence[str]) -> None:
    """Go on with an interrupted run, bit for bit."""
    arguments = tyro.cli(ResumeArguments, prog="fsl-sage resume", args=args)
    config = RunDirectory(arguments.directory).config()
    options = {"workers": arguments.workers, "engine": arguments.engine, "ray_address": arguments.ray_address}
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _show(config, lambda display: resume(arguments.directory, [display], **changes))


def cost_command(args: Sequence[str]) -> None:
    """Print the bytes of a round for every algorithm, without training."""
    arguments = _parse(CostArguments, "cost", args)
    costs = cost(arguments.config)
    if arguments.json:
        print(json.dumps(costs, indent=2))
    else:
        print_costs(OUT, costs, part_sizes(arguments.config), arguments.config)


def cuts_command(args: Sequence[str]) -> None:
    """Show where a model can be cut, what each cut costs, and which to take."""
    arguments = _parse(CutsArguments, "cuts", args)
    given = {
        name: parse_amount(text, option(name))
        for name in ("client_memory", "uplink", "client_flops")
        if (text := getattr(arguments, name)) is not None
    }
    limits, table = Limits(**given), rows(arguments.config)
    if arguments.json:
        print(json.dumps(as_json(table, limits, arguments.config.algorithm), indent=2))
    else:
        print_cuts(OUT, arguments.config, table, limits)
    if arguments.figure is not None:
        cuts_figure(arguments.figure, arguments.config, table, limits)


def compare_command(args: Sequence[str]) -> None:
    """Run a grid of algorithms, seeds and settings, and write a report; resumable."""
    arguments, grid = _parse_comparison(args)
    config = arguments.config
    if config.engine == "ray":  # each run is on one machine of the cluster, and there it is a run like any other
        config = replace(config, engine="local", ray_address=None)
    plans = plan_runs(config, grid)
    if arguments.dry_run:
        print_costs_of_grid(OUT, plans, costs_of_runs(plans))
        return
    folder = arguments.config.out
    if folder is None:
        raise InputError("compare needs --out, the folder for its runs; give the same one to go on.")
    check_setups(plans)
    try:
        with locked(folder):
            jobs = prepare(plans, folder)
            with machines(arguments.config, len(jobs), arguments.jobs) as (at_once, workers, start):
                run_grid(jobs, at_once, workers, Progress(OUT, jobs), start)
            if any(job.state == "finished" for job in jobs):
                print_report(OUT, write_report(folder, folder / "report", arguments.report))
    except KeyboardInterrupt:
        ERRORS.print("\nStopped. Go on with the same command.")
        sys.exit(130)
    raise_failures(jobs)


def report_command(args: Sequence[str]) -> None:
    """Write figures, tables and report.html from finished runs."""
    arguments = tyro.cli(ReportArguments, prog="fsl-sage report", args=args)
    out = arguments.out or arguments.folder / "report"
    print_report(OUT, write_report(arguments.folder, out, arguments.report))


def data_command(args: Sequence[str]) -> None:
    """Get a data set or a language model ahead of time: fsl-sage data get NAME."""
    arguments = tyro.cli(DataArguments, prog="fsl-sage data", args=args)
    if arguments.action != "get":
        raise InputError(f"'fsl-sage data {arguments.action}' is not known: there is 'fsl-sage data get NAME'.")
    path = fetch(arguments.name, arguments.dir)
    OUT.print(f"{arguments.name} is in {path}", highlight=False, soft_wrap=True)
    if arguments.name == SMOLLM2:
        OUT.print(f"Use it with --model.name hf:{path.resolve()}", highlight=False, soft_wrap=True)


def samples_command(args: Sequence[str]) -> None:
    """Show what the language model of a finished run writes, beside what people wrote, and how that scores."""
    arguments = tyro.cli(SamplesArguments, prog="fsl-sage samples", args=args)
    samples = make_samples(OUT, arguments.directory, arguments.options)
    print_samples(OUT, samples[:SHOWN] if arguments.options.scores else samples)
    if arguments.options.scores:
        scores = score_samples(samples)
        losses = masked_losses(arguments.directory)
        write_samples(arguments.directory, samples, scores, losses, arguments.options)
        print_scores(OUT, scores, losses)
        OUT.print(f"samples.jsonl and scores.json are in {arguments.directory}", highlight=False, soft_wrap=True)


def deploy_command(args: Sequence[str]) -> None:
    """Separate organisations on Flower: fsl-sage deploy init DIR, or a demo by fsl-sage deploy demo."""
    if find_spec("flwr") is None:
        raise MissingExtra("fsl-sage deploy", "flower")
    from fsl_sage.deploy.commands import init, show_demo

    action, rest = (args[0], args[1:]) if args else ("", args)
    if action == "demo":
        show_demo(OUT, tyro.cli(DemoArguments, prog="fsl-sage deploy demo", args=rest).keep)
    elif action == "init" and rest:
        named = not rest[0].startswith("-")
        arguments = _parse(InitArguments, "deploy init DIR", rest[1:] if named else rest)
        if not named:
            raise InputError("'fsl-sage deploy init' needs the directory of the app first: fsl-sage deploy init DIR.")
        init(OUT, Path(rest[0]), arguments.config, arguments.examples, arguments.sites)
    else:
        raise InputError("There are 'fsl-sage deploy init DIR' and 'fsl-sage deploy demo'.")


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "run": run_command,
    "resume": resume_command,
    "compare": compare_command,
    "report": report_command,
    "cost": cost_command,
    "cuts": cuts_command,
    "data": data_command,
    "samples": samples_command,
    "deploy": deploy_command,
}


Arguments = TypeVar("Arguments", RunArguments, CostArguments, CutsArguments, InitArguments)
Parsed = TypeVar("Parsed", RunArguments, CostArguments, CutsArguments, InitArguments, CompareArguments)


def _parse(kind: type[Arguments], command: str, args: Sequence[str]) -> Arguments:
    """Options over a preset over the defaults."""
    return _over_defaults(
        _preset_of(args),
        lambda base: tyro.cli(kind, prog=f"fsl-sage {command}", default=kind(config=base), args=args),
    )


def _parse_comparison(args: Sequence[str]) -> tuple[CompareArguments, Grid]:
    """Options over a preset and its table [compare] over the defaults; `--vary` replaces option by option."""
    source = _preset_of(args)
    grid = Grid() if source is None else load_grid(source)
    default = CompareArguments(
        algorithms=grid.algorithms, seeds=grid.seeds, alpha=grid.alpha, report=ReportOptions(grid.target)
    )
    arguments = _over_defaults(
        source,
        lambda base: tyro.cli(
            CompareArguments, prog="fsl-sage compare", default=replace(default, config=base), args=args
        ),
    )
    vary = {**grid.vary, **parse_vary(arguments.vary)}
    grid = Grid(arguments.algorithms, arguments.seeds, arguments.alpha, vary)
    base = _base(source, default_config(arguments.config.data.name))
    refuse_overruled(arguments.config, base, grid)
    return replace(arguments, config=for_algorithms(arguments.config, base, arguments.algorithms)), grid


def _over_defaults(source: str | None, parse: Callable[[Config], Parsed]) -> Parsed:
    """What `parse` makes of the options over a preset over the defaults of the data, which the options may name."""
    base = _base(source)
    arguments = parse(base)
    own = default_config(arguments.config.data.name)
    return arguments if own == default_config(base.data.name) else parse(_base(source, own))


def _base(source: str | None, defaults: Config | None = None) -> Config:
    return (defaults or Config()) if source is None else load_preset(source, defaults)


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
    except BrokenPipeError:  # the reader of our output, `head` or `less`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (InputError, TrainingError) as error:
        ERRORS.print(f"[bold red]fsl-sage:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, InputError) else 1)


if __name__ == "__main__":
    main()

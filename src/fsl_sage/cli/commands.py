"""The commands: each parses its arguments, calls the package and prints."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsl_sage.cli.arguments import (
    CostArguments,
    CutsArguments,
    DataArguments,
    DemoArguments,
    EvaluateArguments,
    ExportArguments,
    InitArguments,
    PredictArguments,
    ReportArguments,
    ResumeArguments,
    RunArguments,
    SamplesArguments,
    TheoryArguments,
    WatchArguments,
)
from fsl_sage.cli.consoles import ERRORS, OUT, without_controls
from fsl_sage.cli.cuts import as_json, print_cuts
from fsl_sage.cli.figure_file import check_figure
from fsl_sage.cli.front import print_names
from fsl_sage.cli.parsing import parse, parse_comparison
from fsl_sage.cli.progress import Progress, print_costs_of_grid
from fsl_sage.cli.report import print_report
from fsl_sage.cli.samples import print_samples, print_scores, progress_bar
from fsl_sage.cli.stopping import exit_code
from fsl_sage.cli.terminal import Display, print_costs, print_metrics, print_summary
from fsl_sage.cli.theory import print_theory
from fsl_sage.cli.watch import watch
from fsl_sage.cli.words import read
from fsl_sage.compare.comparison import compare, plan_grid
from fsl_sage.compare.dry import costs_of_runs
from fsl_sage.config import Config, option
from fsl_sage.errors import InputError, MissingExtra, nearest
from fsl_sage.experiment import Result, cost, part_sizes, resume, run
from fsl_sage.experiment.cuts import Limits, cuts_of
from fsl_sage.inference import evaluate, predict
from fsl_sage.models.foreign import convert_weights
from fsl_sage.problems.images.cifar import CIFAR
from fsl_sage.problems.images.fashion_mnist import FASHION
from fsl_sage.problems.make import named, score_of
from fsl_sage.problems.sources import MODELS, fetch
from fsl_sage.problems.texts.imdb import IMDB
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.theory import as_plain, theory_of
from fsl_sage.report.write import write_report
from fsl_sage.text.samples import SHOWN, make_samples, score_samples, write_samples
from fsl_sage.text.trained import masked_losses
from fsl_sage.units import parse_amount

FETCHED = ("cifar10-mini", *CIFAR, FASHION, IMDB, *MODELS)
"""What `fsl-sage data get` knows."""


def run_command(args: Sequence[str]) -> None:
    """Train, and write a run directory."""
    config = parse(RunArguments, "run", args).config
    _show(config, lambda display: run(config, [display]))


def resume_command(args: Sequence[str]) -> None:
    """Resume an interrupted run; its numbers are as if it had never been interrupted."""
    arguments = read(ResumeArguments, "resume", args)
    config = RunDirectory(arguments.directory).config()
    options = {"workers": arguments.workers, "engine": arguments.engine, "ray_address": arguments.ray_address}
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _show(config, lambda display: resume(arguments.directory, [display], **changes))


def predict_command(args: Sequence[str]) -> None:
    """Classify images by the model of a finished run."""
    arguments = read(PredictArguments, "predict", args)
    if not arguments.files:
        raise InputError("'fsl-sage predict' needs images: fsl-sage predict RUN FILES.")
    for found in predict(arguments.directory, arguments.files, top=arguments.top, best=arguments.best):
        likely = dict(zip(found.classes, found.probabilities, strict=True))
        if arguments.json:
            print(json.dumps({"file": str(found.file), "classes": likely}))
        else:
            said = ", ".join(f"{name} {probability:.1%}" for name, probability in likely.items())
            line = without_controls(f"{found.file}: {said}".replace("\n", " "))
            OUT.print(line, highlight=False, soft_wrap=True, markup=False)


def evaluate_command(args: Sequence[str]) -> None:
    """Test the model of a finished run once more, on its own test set or on another."""
    arguments = read(EvaluateArguments, "evaluate", args)
    with progress_bar(OUT, "evaluating") as told:
        metrics = evaluate(arguments.directory, arguments.data, best=arguments.best, told=told)
    if arguments.json:
        print(json.dumps(metrics))
        return
    run = RunDirectory(arguments.directory)
    print_metrics(OUT, run, arguments.data or run.config().data.name, metrics)


def cost_command(args: Sequence[str]) -> None:
    """Print the bytes of a round for every algorithm, without training."""
    arguments = parse(CostArguments, "cost", args)
    config = named(arguments.config)
    costs = cost(config)
    if arguments.json:
        print(json.dumps(costs, indent=2))
    else:
        print_costs(OUT, costs, part_sizes(config), config)


def cuts_command(args: Sequence[str]) -> None:
    """Show where a model can be cut, what each cut costs, and which to take."""
    arguments = parse(CutsArguments, "cuts", args)
    given = {
        name: parse_amount(text, option(name))
        for name in ("client_memory", "uplink", "client_flops")
        if (text := getattr(arguments, name)) is not None
    }
    check_figure(arguments.figure)
    config = named(arguments.config)
    limits, cuts = Limits(**given), cuts_of(config)
    if arguments.json:
        print(json.dumps(as_json(cuts, limits, config.algorithm), indent=2))
    else:
        print_cuts(OUT, config, cuts, limits)
    if arguments.figure is not None:
        from fsl_sage.cli.cuts_figure import cuts_figure

        cuts_figure(arguments.figure, config, cuts, limits)


def compare_command(args: Sequence[str]) -> None:
    """Run a grid of algorithms, seeds and settings, and write a report; resumable."""
    arguments, grid = parse_comparison(args)
    config = arguments.config
    for target in arguments.report.target:
        score_of(config).check_target(target, "--target")
    combined: dict[str, Any] = {name: getattr(grid, name) for name in ("algorithms", "seeds", "alpha", "vary")}
    if arguments.dry_run:
        plans = plan_grid(config, **combined)
        print_costs_of_grid(OUT, plans, costs_of_runs(plans))
        return
    try:
        comparison = compare(config, **combined, jobs=arguments.jobs, watcher=Progress(OUT))
        if comparison.results:
            print_report(OUT, write_report(comparison.folder, comparison.folder / "report", arguments.report))
    except KeyboardInterrupt as stop:
        ERRORS.print("\nStopped. Give the same command to resume.")
        sys.exit(exit_code(stop))
    comparison.raise_failures()


def report_command(args: Sequence[str]) -> None:
    """Write figures, tables and report.html from finished runs."""
    arguments = read(ReportArguments, "report", args)
    out = arguments.out or arguments.folder / "report"
    print_report(OUT, write_report(arguments.folder, out, arguments.report))


def watch_command(args: Sequence[str]) -> None:
    """Show runs live in the browser, on a page of this machine alone."""
    arguments = read(WatchArguments, "watch", args)
    watch(OUT, arguments.folder, arguments.port, open_browser=arguments.open)


def theory_command(args: Sequence[str]) -> None:
    """Show a run beside the paper's convergence theory."""
    arguments = read(TheoryArguments, "theory", args)
    check_figure(arguments.figure)
    theory = theory_of(arguments.directory)
    if arguments.json:
        print(json.dumps(as_plain(theory), indent=2, allow_nan=False))
        return
    print_theory(OUT, theory)
    from fsl_sage.report.theory_figure import theory_figure

    file = arguments.figure or arguments.directory / "theory.png"
    theory_figure(file, theory)
    OUT.print(f"The figure is {file}", highlight=False, markup=False, soft_wrap=True)


def data_command(args: Sequence[str]) -> None:
    """Get a data set or a model ahead of time (data get NAME), or convert a model's weights (data convert DIR)."""
    arguments = read(DataArguments, "data", args)
    if arguments.action == "convert":
        written = convert_weights(Path(arguments.name).expanduser())
        OUT.print(f"The weights are in {written}; the .bin files may go", highlight=False, markup=False, soft_wrap=True)
        return
    if arguments.action != "get":
        raise InputError(
            f"'fsl-sage data {arguments.action}' is not known: there are 'fsl-sage data get NAME' and 'fsl-sage data "
            "convert DIR'."
        )
    _check_fetched(arguments.name)
    path = fetch(arguments.name, arguments.dir)
    OUT.print(f"{arguments.name} is in {path}", highlight=False, markup=False, soft_wrap=True)
    if arguments.name in MODELS:
        OUT.print(f"Use it with --model.name hf:{path.resolve()}", highlight=False, markup=False, soft_wrap=True)


def _check_fetched(name: str) -> None:
    """Refuse what is not fetched: it is on this machine already, or is nowhere."""
    kind, colon, _ = name.partition(":")
    if name not in FETCHED:
        here = f" {kind}: names what is on this machine already." if colon else ""
        raise InputError(f"'{name}' is nothing to fetch{nearest(name, FETCHED, '; there are')}{here}")


def samples_command(args: Sequence[str]) -> None:
    """Show what the language model of a finished run writes, beside what people wrote, and how that scores."""
    arguments = read(SamplesArguments, "samples", args)
    samples = make_samples(arguments.directory, arguments.options, partial(progress_bar, OUT))
    print_samples(OUT, samples[:SHOWN] if arguments.options.scores else samples)
    if arguments.options.scores:
        scores = score_samples(samples)
        losses = masked_losses(arguments.directory)
        write_samples(arguments.directory, samples, scores, losses, arguments.options)
        print_scores(OUT, scores, losses)
        OUT.print(
            f"samples.jsonl and scores.json are in {arguments.directory}", highlight=False, markup=False, soft_wrap=True
        )


def deploy_command(args: Sequence[str]) -> None:
    """Separate organisations on Flower: fsl-sage deploy init DIR, or a demo by fsl-sage deploy demo."""
    action, rest = (args[0], args[1:]) if args else ("--help", args)
    if action in ("-h", "--help"):
        _help_on_deploy()
        return
    if find_spec("flwr") is None:
        raise MissingExtra("fsl-sage deploy", "flower")
    from fsl_sage.deploy.commands import export, init, show_demo

    if action == "demo":
        wishes = read(DemoArguments, "deploy demo", rest)
        show_demo(OUT, wishes.keep, language=wishes.language)
    elif action == "init" and rest:
        directory, rest = _directory_first("init", "of the app", InitArguments, rest)
        arguments = parse(InitArguments, "deploy init DIR", rest)
        init(OUT, directory, arguments.config, arguments.examples, arguments.sites)
    elif action == "export-side" and rest:
        directory, rest = _directory_first("export-side", "for the files", ExportArguments, rest)
        chosen = parse(ExportArguments, "deploy export-side DIR", rest)
        export(OUT, directory, chosen.config, chosen.part)
    else:
        raise InputError(
            "There are 'fsl-sage deploy init DIR', 'fsl-sage deploy export-side DIR' and 'fsl-sage deploy demo'."
        )


def _directory_first(action: str, what: str, kind: Any, rest: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """The directory that an action begins with, and the other words."""
    if rest[0].startswith("-"):
        parse(kind, f"deploy {action} DIR", rest)  # it may be --help
        raise InputError(f"'fsl-sage deploy {action}' needs the directory {what} first: fsl-sage deploy {action} DIR.")
    return Path(rest[0]), rest[1:]


_DEPLOY = {
    "init DIR": "Write a Flower app for them; 'flwr run' starts it.",
    "export-side DIR": "Write those files of a model that one side needs.",
    "demo": "Three sites on this machine: TLS, authenticated nodes, three rounds, and a comparison. With --language a "
    "pretrained language model, at sites whose memory it does not fit.",
}


def _help_on_deploy() -> None:
    for usage, action in zip(("usage:", "", ""), _DEPLOY, strict=True):
        OUT.print(f"{usage:<6} fsl-sage deploy {action} [OPTIONS]", markup=False)
    OUT.print("\nSeparate organisations that keep their data, on Flower.\n")
    print_names(_DEPLOY)
    OUT.print("\nfsl-sage deploy init --help and the like explain the options.", highlight=False)


def _show(config: Config, train: Callable[[Display], Result]) -> None:
    display = Display(OUT)
    try:
        result = train(display)
    except KeyboardInterrupt as stop:
        display.stop()
        _leave(display, exit_code(stop))
    finally:
        display.stop()
    print_summary(OUT, result.directory, config, json.loads(RunDirectory(result.directory).result_file.read_text()))


def _leave(display: Display, code: int) -> None:
    """Leave at once: worker threads may be deep in a long local round."""
    again = "No round was played yet."
    if display.directory:
        again = f"Resume with: {RunDirectory(display.directory).resuming}"
    ERRORS.print(f"\nStopped. {again}", highlight=False, markup=False, soft_wrap=True)
    sys.stdout.flush()
    os._exit(code)

"""The commands by name, and what becomes of their errors."""

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsl_sage.cli.consoles import ERRORS, OUT, Output, without_controls
from fsl_sage.cli.stopping import exit_code, stops
from fsl_sage.config import preset_names
from fsl_sage.errors import InputError, RunWarning, TrainingError, nearest

COMMANDS = {
    "run": "Train, and write a run directory.",
    "resume": "Resume an interrupted run; its numbers are as if it had never been interrupted.",
    "predict": "Classify images by the model of a finished run.",
    "evaluate": "Test the model of a finished run once more, on its own test set or on another.",
    "compare": "Run a grid of algorithms, seeds and settings, and write a report; resumable.",
    "watch": "Show runs live in the browser, on a page of this machine alone.",
    "report": "Write figures, tables and report.html from finished runs.",
    "cost": "Print the bytes of a round for every algorithm, without training.",
    "cuts": "Show where a model can be cut, what each cut costs, and which to take.",
    "theory": "Show a run beside the paper's convergence theory: constants, conditions, bounds.",
    "data": "Get a data set or a model ahead of time (get NAME), or convert a model's weights (convert DIR).",
    "samples": "Show what the language model of a finished run writes, beside what people wrote, and its scores.",
    "deploy": "Separate organisations on Flower: deploy init DIR writes an app, deploy demo shows one.",
}
"""All commands. `fsl_sage.cli.commands` has a function NAME_command for each. It is imported only to run one, because
it imports torch, which takes seconds."""
LASTING = ("run", "resume", "compare", "watch")
"""The commands that go on when nobody reads any more what they print."""


def _help() -> None:
    OUT.print("[bold]fsl-sage[/]: federated split learning, FSL-SAGE and the systems it is compared with.\n")
    OUT.print("usage: fsl-sage COMMAND [OPTIONS]", markup=False)
    OUT.print("fsl-sage COMMAND --help explains a command's options.\n")
    print_names(COMMANDS)
    OUT.print(f"\npresets: {', '.join(preset_names())} (with --preset), or your own TOML file", highlight=False)


def print_names(summaries: Mapping[str, str]) -> None:
    """Names with a line on each; a long one goes on below its own beginning, not below the names."""
    table = Table.grid("", "", padding=(0, 2))
    table.columns[0].no_wrap = True
    for name, summary in summaries.items():
        table.add_row(Text(name, style="bold"), Text(summary))
    OUT.print(Padding(table, (0, 0, 0, 2), expand=False), highlight=False)


def _print_warnings() -> None:
    """Print warnings of a run as sentences, without the line of code that they come from."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, RunWarning):
            said = escape(without_controls(str(message)))
            ERRORS.print(f"[bold yellow]fsl-sage:[/] {said}", highlight=False, soft_wrap=True)
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show
    warnings.simplefilter("always", RunWarning)


def obey(args: Sequence[str]) -> None:
    """Run the command that these words give."""
    Output.goes_on = args[0] in LASTING if args else False
    if not args or args[0] in ("-h", "--help", "help"):
        _help()
        return
    _print_warnings()
    try:
        with stops():
            if args[0] not in COMMANDS:
                raise InputError(f"'{args[0]}' is not a command{nearest(args[0], COMMANDS, '; there are')}")
            _command(args[0])(args[1:])
    except BrokenPipeError:  # the reader of our output, `head` or `less`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (InputError, TrainingError) as error:
        _complain(str(error))
        sys.exit(2 if isinstance(error, InputError) else 1)
    except OSError as error:  # what nobody foresaw: a full disk under the output, or files out of reach
        _complain(f"{error.filename or 'A file'} cannot be used: {error.strerror or error}.")
        sys.exit(1)
    except KeyboardInterrupt as stop:
        _complain("Stopped.")
        sys.exit(exit_code(stop))


def _command(name: str) -> Callable[[Sequence[str]], None]:
    found: Callable[[Sequence[str]], None] = getattr(
        importlib.import_module("fsl_sage.cli.commands"), f"{name}_command"
    )
    return found


def _complain(said: str) -> None:
    ERRORS.print(f"[bold red]fsl-sage:[/] {escape(without_controls(said))}", highlight=False, soft_wrap=True)

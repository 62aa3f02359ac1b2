"""The `fsl-sage` command."""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from fsl_sage.cli.commands import COMMANDS, ERRORS, OUT
from fsl_sage.cli.stopping import exit_code, stops
from fsl_sage.config import preset_names
from fsl_sage.errors import InputError, RunWarning, TrainingError


def _help() -> None:
    OUT.print("[bold]fsl-sage[/]: federated split learning, FSL-SAGE and the systems it is compared with.\n")
    OUT.print("usage: fsl-sage COMMAND [OPTIONS]      fsl-sage COMMAND --help explains a command's options\n")
    for name, command in COMMANDS.items():
        OUT.print(f"  [bold]{name:<8}[/] {(command.__doc__ or '').splitlines()[0]}", highlight=False)
    OUT.print(f"\npresets: {', '.join(preset_names())} (with --preset), or your own TOML file", highlight=False)


def _print_warnings() -> None:
    """Print warnings of a run as sentences, without the line of code that they come from."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, RunWarning):
            ERRORS.print(f"[bold yellow]fsl-sage:[/] {escape(str(message))}", highlight=False, soft_wrap=True)
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show
    warnings.simplefilter("always", RunWarning)


def main(args: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 a training that failed, 2 an impossible option or file, 130 interrupted, 143 terminated."""
    args = sys.argv[1:] if args is None else list(args)
    if not args or args[0] in ("-h", "--help", "help"):
        _help()
        return
    _print_warnings()
    try:
        with stops():
            if args[0] not in COMMANDS:
                raise InputError(f"'{args[0]}' is not a command: there are {', '.join(COMMANDS)}.")
            COMMANDS[args[0]](args[1:])
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


def _complain(said: str) -> None:
    ERRORS.print(f"[bold red]fsl-sage:[/] {escape(said)}", highlight=False, soft_wrap=True)

"""One run of a comparison in a process of its own: python -m fsl_sage.report.worker DIRECTORY WORKERS.

The directory holds the run's config.json; a run that was interrupted goes on, a new one begins.
"""

import os
import sys
import threading
from pathlib import Path

from rich.console import Console

from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import resume
from fsl_sage.report.terminal import Display


def main() -> None:
    """Exit codes as of the command line."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        resume(Path(sys.argv[1]), [Display(Console(width=160))], int(sys.argv[2]))
    except (InputError, TrainingError) as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)


def _leave_with_parent() -> None:
    """Standard input ends when the comparison ends, however it does: no run may be left without one that watches it."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()

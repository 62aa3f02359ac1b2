"""One run of a comparison in a process of its own: python -m fsl_sage.compare.one_run DIRECTORY WORKERS.

The directory holds the run's config.json. A run that was interrupted is resumed, a new one begins.
"""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from fsl_sage.engines.process import import_path
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import resume
from fsl_sage.records.plain_lines import PlainLines

LOG = "run.log"
"""In the run's directory: what the process prints."""


def start_process(directory: Path, workers: int, *, new_session: bool = False) -> subprocess.Popen[bytes]:
    """Start this module for the run in a directory. The process ends when its standard input does."""
    with open(directory / LOG, "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fsl_sage.compare.one_run", str(directory), str(workers)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": import_path()},
            start_new_session=new_session,
        )


def main() -> None:
    """Exit codes as of the command line."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    keep_priority()
    try:
        resume(Path(sys.argv[1]), [PlainLines()], int(sys.argv[2]))
    except (InputError, TrainingError) as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)


def keep_priority() -> None:
    """Give this process's session the priority that the process has.

    Linux shares processors among sessions first, each with a priority of its own, so `nice` means nothing to a process
    that has begun a session. Elsewhere there is nothing to do.
    """
    if os.getsid(0) != os.getpid():
        return  # the session is somebody else's
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(os.nice(0)))


def _leave_with_parent() -> None:
    """Exit when standard input ends. That happens when the comparison ends, even by kill -9: no run is left alone."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()

"""How long a person waits before anything happens: the command and the package, against bare Python and torch.

By processor time, which on a machine with something to spare is the time that passes.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Callable

from benchmarks.timing import CONSOLE, compare, note

PYTHON = ("-c", "pass")
TORCH = ("-c", "import torch")
STARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fsl-sage --version over bare Python": (("-m", "fsl_sage", "--version"), PYTHON),
    "fsl-sage --help over bare Python": (("-m", "fsl_sage", "--help"), PYTHON),
    "import fsl_sage over import torch": (("-c", "import fsl_sage"), TORCH),
    "from fsl_sage import run over import torch": (("-c", "from fsl_sage import run"), TORCH),
}


def start(words: tuple[str, ...]) -> Callable[[], object]:
    """A new interpreter with these words. It may keep what it has compiled, as for an installed package."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return lambda: subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, env=kept)


def children() -> float:
    """The processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    for what, (ours, theirs) in STARTS.items():
        ratio = compare(start(ours), start(theirs), clock=children)
        CONSOLE.print(f"{what}: {ratio}")
        note(what, ratio.median)


if __name__ == "__main__":
    main()

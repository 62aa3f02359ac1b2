"""The `fsl-sage` command."""

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 a training that failed, 2 an impossible option or file, 130 interrupted, 143 terminated."""
    args = sys.argv[1:] if args is None else list(args)
    if args[:1] in (["--version"], ["-V"]):
        from fsl_sage import __version__

        print(f"fsl-sage {__version__}")
        return
    from fsl_sage.cli.front import obey  # later than the version, which should come at once

    obey(args)

"""Where commands print."""

from rich.console import Console

OUT = Console()
ERRORS = Console(stderr=True)

"""Where commands print."""

from rich.console import Console

OUT = Console()
ERRORS = Console(stderr=True)


def without_controls(text: str) -> str:
    """A text that may come from a file of somebody else, without what would command the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)

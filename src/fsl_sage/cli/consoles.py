"""Where commands print."""

import os
from typing import ClassVar

from rich.console import Console


class Output(Console):
    """Prints as long as somebody reads. A name such as folder:key stays as it is: it is no emoji."""

    goes_on: ClassVar[bool] = False
    """Whether the command goes on when nobody reads any more: a training is worth more than what it prints."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, like: Console | None = None) -> None:
        super().__init__(emoji=False, stderr=stderr, width=width, file=None if like is None else like.file)

    def on_broken_pipe(self) -> None:
        """The reader, `head` or `less`, has seen enough: print nothing more, and be done if that was all."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        if not self.goes_on and not self.stderr:  # an error that nobody reads still decides the exit code
            raise SystemExit(0)


OUT = Output()
ERRORS = Output(stderr=True)


def without_controls(text: str) -> str:
    """A text that may come from a file of somebody else, without what would command the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)

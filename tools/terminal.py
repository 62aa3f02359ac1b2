"""Pictures of the terminal for the docs, each light and dark: python -m tools.terminal NAME COMMAND ...

The command is run as it stands, in a terminal of 96 columns whose live parts are left out. What it prints becomes
docs/NAME-light.svg and docs/NAME-dark.svg. `--last N` keeps the last N lines.
"""

import argparse
import os
import shlex
import subprocess
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = 96
TERMINAL = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(COLUMNS)}


def _theme(ground: str, ink: str, soft: str, *colours: str) -> TerminalTheme:
    """Black is the ink, so that text that asks for black can be read on a dark ground too."""
    ansi = [_rgb(colour) for colour in (ink, *colours, soft)]
    return TerminalTheme(_rgb(ground), _rgb(ink), ansi, ansi)


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour)
    return red, green, blue


THEMES = {  # ground, ink, soft; red, green, yellow, blue, magenta, cyan
    "light": _theme("f7f8fa", "1d2430", "5b6575", "b02a37", "146e3c", "8c5a00", "005ca0", "963278", "006e78"),
    "dark": _theme("161b22", "e6eaf1", "a3adbb", "ff8282", "6ed28c", "f0be5a", "64b4f0", "e39cc4", "5ad2d7"),
}
# Without the fonts that rich asks a web server for: a page that is opened offline must look the same.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


def shown(command: list[str], last: int | None) -> Text:
    """What a terminal shows after a command was typed."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **TERMINAL})
    lines = (done.stdout + done.stderr).rstrip().splitlines()
    kept = lines if last is None else lines[-last:]
    return Text.assemble(("$ ", "bold"), (f"{shlex.join(command)}\n", "bold"), Text.from_ansi("\n".join(kept)))


def main() -> None:
    """Draw one picture, light and dark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--last", type=int)
    parser.add_argument("name")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    text = shown(asked.command, asked.last)
    for theme, colours in THEMES.items():
        with open(os.devnull, "w") as nowhere:
            console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
            console.print(text, soft_wrap=True)
            file = DOCS / f"{asked.name}-{theme}.svg"
            console.save_svg(str(file), title="", theme=colours, code_format=SVG, unique_id=asked.name)
            print(file.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()

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

_LIGHT = [(29, 36, 48), (176, 42, 55), (20, 110, 60), (140, 90, 0), (0, 92, 160), (150, 50, 120), (0, 110, 120)]
_DARK = [(230, 234, 241), (255, 130, 130), (110, 210, 140), (240, 190, 90), (100, 180, 240), (227, 156, 196), (90, 210, 215)]
THEMES = {
    "light": TerminalTheme((247, 248, 250), (29, 36, 48), [*_LIGHT, (91, 101, 117)], [*_LIGHT, (91, 101, 117)]),
    "dark": TerminalTheme((22, 27, 34), (230, 234, 241), [*_DARK, (163, 173, 187)], [*_DARK, (163, 173, 187)]),
}
# Without the fonts that rich asks a web server for: a page that is opened offline must look the same.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 16px; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
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

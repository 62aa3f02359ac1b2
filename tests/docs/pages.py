"""The pages of the documentation, as the repository has them: their links, headings and blocks of code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "examples" / "README.md",
        ROOT / "experiments" / "README.md",
    )
)
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_ATTRIBUTE = re.compile(r'\b(?:src|srcset|href)="([^"]+)"')


class Block(NamedTuple):
    page: Path
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{named(self.page)}:{self.line}"


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [Block(page, m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in _FENCE.finditer(text)]


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", page.read_text("utf-8")))


def links(page: Path) -> list[str]:
    without_blocks = _FENCE.sub("", page.read_text("utf-8"))
    return [*_LINK.findall(without_blocks), *_ATTRIBUTE.findall(without_blocks)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the repository host makes them."""
    headings = re.findall(r"^#+ +(.*)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    found: dict[str, int] = {}
    for heading in headings:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {
        anchor if not again else f"{anchor}-{again}" for anchor, count in found.items() for again in range(count + 1)
    }


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(place, words) of every `fsl-sage` command in the blocks of a page that are not Python or data."""
    for block in blocks(page):
        if block.language not in ("", "console", "sh", "bash", "shell"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["fsl-sage"]:
                yield str(block), words[1:]

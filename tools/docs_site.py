"""What the documentation's site has beside docs/: pages from the repository's other files, and the API reference.

mkdocs calls the functions below (`hooks` in mkdocs.yml). Links in the pages are written for the repository's files.
Those that lead out of docs/ are turned to the page that the site has of that file, or into plain text.
"""

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "experiments/README.md": "experiments.md",
}
"""Files outside of docs/ that are pages of the site, and their names there."""
PICTURES = ".png", ".svg"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_SOURCE = re.compile(r'\b(src|srcset|href)="([^"]+)"')


def on_config(config: Any) -> Any:
    """Put pages into the navigation that nobody has listed."""
    listed = set(re.findall(r"[\w/-]+\.md", str(config["nav"])))
    others = [path for path in sorted((ROOT / "docs").rglob("*.md")) if _inside(path) not in listed]
    config["nav"][-1]["Reference"] += [_inside(path) for path in others]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from elsewhere, the API reference, and the pictures that pages show from outside of docs/."""
    for source, page in ELSEWHERE.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    files.append(File.generated(config, "api.md", content=_reference()))
    shown = {target for path in _sources() for _, target, _ in _targets(path) if target.endswith(PICTURES)}
    for picture in sorted(shown):
        if not picture.startswith("docs/"):
            files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that lead out of docs/."""
    here = page.file.src_uri
    back = {name: source for source, name in ELSEWHERE.items()}
    source = back.get(here, f"docs/{here}")
    if source == "docs/api.md":
        return markdown

    def link(found: re.Match[str]) -> str:
        shown, text, target = found.groups()
        there = _turned(source, here, target)
        return text if there is None else f"{shown}[{text}]({there})"

    def attribute(found: re.Match[str]) -> str:
        return f'{found[1]}="{_turned(source, here, found[2]) or found[2]}"'

    return _SOURCE.sub(attribute, _LINK.sub(link, markdown))


def _turned(source: str, here: str, target: str) -> str | None:
    """A link of the file `source`, for the page `here` of the site; None where the site has nothing of the kind."""
    path, mark, anchor = target.partition("#")
    if "://" in target or target.startswith("mailto:") or not path:
        return target
    full = os.path.normpath(PurePosixPath(source).parent / path)
    if full in ELSEWHERE:
        there = ELSEWHERE[full]
    elif full.startswith("docs/"):
        there = full.removeprefix("docs/")
        if (ROOT / full).is_dir():
            there += "/README.md"
    elif full.endswith(PICTURES):
        there = full
    else:
        return None
    return os.path.relpath(there, PurePosixPath(here).parent) + mark + anchor


def _sources() -> list[Path]:
    """The files that pages are made of."""
    return [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ELSEWHERE if (ROOT / name).exists())]


def _targets(path: Path) -> list[tuple[str, str, str]]:
    """(text, file in the repository, anchor) of every relative link of a page."""
    found = []
    text = path.read_text("utf-8")
    links = [(text, target) for _, text, target in _LINK.findall(text)]
    links += [("", target) for _, target in _SOURCE.findall(text)]
    for said, target in links:
        name, _, anchor = target.partition("#")
        if "://" not in target and name:
            found.append((said, os.path.normpath(path.parent.relative_to(ROOT) / name), anchor))
    return found


def _inside(path: Path) -> str:
    return path.relative_to(ROOT / "docs").as_posix()


def _reference() -> str:
    """A section for each public name, from its docstring; functions first, then classes and values."""
    tree = ast.parse((ROOT / "src/fsl_sage/api.py").read_text("utf-8"))
    homes = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name != "document"
    }
    functions = sorted(name for name in homes if name.islower())
    classes = sorted(name for name in homes if not name.islower() and not name.isupper())
    lines = [
        "# Python API",
        "",
        "Every name is imported from `fsl_sage`. `help(fsl_sage.Config)` shows the same in a terminal.",
    ]
    for title, names in (("Functions", functions), ("Classes", classes)):
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"::: fsl_sage.api.{name}"]
    return "\n".join(lines) + "\n"

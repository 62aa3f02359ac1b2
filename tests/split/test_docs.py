"""The code in the page on splitting runs as it stands."""

import re
from pathlib import Path
from typing import Any

import fsl_sage.split

PAGE = Path(__file__).parents[2] / "docs" / "splitting.md"


def test_the_pages_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    rows = names["cut_points"](names["model"], names["batch"])
    assert [row.name for row in rows] == ["0", "1", "2", "3", "4", "5"]


def test_the_page_names_what_the_package_offers() -> None:
    page = PAGE.read_text(encoding="utf-8")
    internal = {"Analysis", "Part", "Split", "CutPoint", "BoundaryTensor", "split_by_analysis"}
    missing = [name for name in fsl_sage.split.__all__ if name not in page and name not in internal]
    assert not missing

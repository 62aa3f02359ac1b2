"""The code in the page on splitting runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

import fsl_sage.split
from fsl_sage.models import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "splitting.md"


def test_the_pages_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    assert len(blocks[-1].splitlines()) < 15
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    MODELS.pop("mine")
    rows = names["cut_points"](names["make_model"](), names["batch"])
    assert [row.name for row in rows] == ["0", "1", "2", "3", "4", "5"]


def test_the_page_names_what_the_package_offers() -> None:
    page = PAGE.read_text(encoding="utf-8")
    internal = {
        "Analysis",
        "AuxiliaryStates",
        "Part",
        "Split",
        "CutPoint",
        "BoundaryTensor",
        "split_by_analysis",
        "cut_points_of",
        "boundary_shapes",
        "output_shapes",
        "Step",
        "crossing_tensors",
        "fixed_tensors",
        "passage",
        "set_fixed",
        "training_step",
        "FITTED_SCALE",
        "Ridge",
        "add_fitted_scale",
        "detached_leaves",
        "fitted_scale",
        "random_features",
        "rms",
        "with_gradients",
    }
    missing = [name for name in fsl_sage.split.__all__ if name not in page and name not in internal]
    assert not missing

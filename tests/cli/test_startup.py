"""What needs no torch does not load it."""

import inspect
import re
import subprocess
import sys

import pytest

import fsl_sage
from fsl_sage.config import help as help_texts

HEAVY = "{'torch', 'numpy', 'matplotlib', 'plotly', 'tyro', 'PIL', 'rich'}"
SAYS_WHAT_IS_LOADED = f"import sys; print('loaded', sorted({HEAVY} & set(sys.modules)))"


def in_a_new_process(code: str) -> list[str]:
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return found.stdout.splitlines()


def test_the_version_needs_nothing() -> None:
    said = in_a_new_process(f"from fsl_sage.cli import main; main(['--version']); {SAYS_WHAT_IS_LOADED}")
    assert said == [f"fsl-sage {fsl_sage.__version__}", "loaded []"]


def test_help_needs_rich_alone() -> None:
    said = in_a_new_process(f"from fsl_sage.cli import main; main(['--help']); {SAYS_WHAT_IS_LOADED}")
    assert said[-1] == "loaded ['rich']"
    assert any("predict" in line for line in said)


def test_a_training_needs_no_figures_and_no_terminal_before_its_end() -> None:
    said = in_a_new_process(f"from fsl_sage import run, compare, report; {SAYS_WHAT_IS_LOADED}")
    assert not {"matplotlib", "plotly", "rich", "tyro"} & set(re.findall(r"\w+", said[-1]))


def test_the_source_of_the_options_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    help_texts._class_bodies.cache_clear()
    read: list[object] = []
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda what: read.append(what) or source(what))
    for kind in (fsl_sage.Config, fsl_sage.DataConfig, fsl_sage.ModelConfig):
        help_texts.document(kind, kind)
    assert len(read) == len({*map(id, read)})


def test_every_public_name_is_there() -> None:
    for name in fsl_sage.__all__:
        assert getattr(fsl_sage, name) is not None
    assert {*fsl_sage.__all__} <= {*dir(fsl_sage)}
    with pytest.raises(AttributeError, match="no_such_name"):
        fsl_sage.no_such_name  # noqa: B018


def test_functions_with_the_names_of_packages_stay_functions() -> None:
    order = "import fsl_sage.compare.grid, fsl_sage.report.tables; from fsl_sage import compare, report"
    assert in_a_new_process(f"{order}; print(callable(compare), callable(report))") == ["True True"]


def test_every_command_has_its_function() -> None:
    from fsl_sage.cli import commands
    from fsl_sage.cli.front import COMMANDS

    assert {f"{name}_command" for name in COMMANDS} == {name for name in vars(commands) if name.endswith("_command")}

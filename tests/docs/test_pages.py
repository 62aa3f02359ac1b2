"""Every page: its links lead somewhere, its Python compiles, its commands are accepted by the command's own parser.

Pages whose code is also run have tests of their own: data.md, splitting.md, CONTRIBUTING.md; the README's below.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from fsl_sage.cli import arguments as kinds
from fsl_sage.cli.front import COMMANDS
from fsl_sage.cli.parsing import parse, parse_comparison
from tests.docs.pages import PAGES, ROOT, anchors, blocks, commands, links, named

RUN_ELSEWHERE = {"data.md"}
"""Its commands need the data that tests/test_data_page.py makes, and runs them with."""
OWN = """
from fsl_sage import Algorithm

class Mine(Algorithm):
    uses = ()
    waits = has_s_server = False
    holds = averaged = ("client", "server")
    def local_round(self, client, t):
        yield from ()
"""


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        there = (page.parent / path).resolve() if path else page
        if there.is_dir():
            there = there / "README.md" if (there / "README.md").exists() and anchor else there
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            lost.append(target)
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            text = block.text
            if "yield " in text and "def " not in text:  # the body of a function
                text = "def body():\n" + re.sub(r"^", "    ", text, flags=re.MULTILINE)
            compile(text, str(block), "exec")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that commands speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    for name in ("my.toml", "PRESET.toml"):
        (tmp_path / name).write_text("rounds = 3\n")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "Food: Thai.", "completion": " Thai food."}\n')
    for name in ("mine.py", "my_algorithm.py"):
        (tmp_path / name).write_text(OWN)
    anchored = next(block for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "python")
    (tmp_path / "anchored.py").write_text(anchored.text)
    return tmp_path


def accept(words: list[str]) -> None:
    """Parse a command as the command line does, and run nothing."""
    command, args = words[0], words[1:]
    assert command in COMMANDS, command
    if command in ("run", "cost", "cuts"):
        parse(getattr(kinds, f"{command.title()}Arguments"), command, args)
    elif command == "compare":
        parse_comparison(args)
    elif command == "deploy":
        action, rest = args[0], args[1:]
        if action == "demo":
            tyro.cli(kinds.DemoArguments, args=rest)
        else:
            assert action in ("init", "export-side")
            parse(kinds.InitArguments if action == "init" else kinds.ExportArguments, f"deploy {action}", rest[1:])
    else:
        tyro.cli(getattr(kinds, f"{command.title()}Arguments"), args=args)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if [*commands(page)] and page.name not in RUN_ELSEWHERE], ids=named
)
def test_commands_are_accepted(page: Path, place: Path) -> None:
    refused = []
    for where, words in commands(page):
        if words == ["--version"] or "--help" in words:
            continue
        try:
            accept([word.replace("/srv/test", str(place / "pairs.jsonl")) for word in words])
        except (Exception, SystemExit) as error:
            refused.append(f"{where}: fsl-sage {' '.join(words)}: {error}")
    for name in ("mine", "my_algorithm", "anchored"):
        sys.modules.pop(name, None)
    assert not refused


def test_a_wrong_command_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", "--ruonds", "3"], ["compare", "--out"], ["watch"], ["deploy", "init", "d", "--nothing"]):
        with pytest.raises((Exception, SystemExit)):
            accept(words)


def test_the_lines_of_the_algorithm_are_those_of_the_file() -> None:
    source = {line.strip() for line in (ROOT / "src/fsl_sage/algorithms/fsl_sage.py").read_text().splitlines()}
    shown = next(block for block in blocks(ROOT / "README.md") if "Algorithm 1" in block.text)
    lines = [line.strip() for line in shown.text.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) == 10
    assert not [line for line in lines if line not in source]


def test_the_three_snippets_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from fsl_sage import Config, DataConfig, ModelConfig, run

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## Your model, your data") :].split("\n## ")[0]
    model, problem, algorithm = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "mine.py").write_text(model)
    (tmp_path / "my_algorithm.py").write_text(algorithm)
    for name in ("mine", "my_algorithm"):
        sys.modules.pop(name, None)
    data = DataConfig(train_images=120, test_images=40)
    own = ModelConfig(name="mine:Net", cut="0")
    assert len(run(Config(algorithm="my_algorithm:Mine", rounds=1, clients=2, model=own, data=data)).metrics) == 1
    exec(compile(problem, "README.md", "exec"), {})
    for name in ("mine", "my_algorithm"):
        sys.modules.pop(name, None)
    assert float(capsys.readouterr().out) > 0


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_without_another_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("run", "Config", "Algorithm", "TensorProblem"):
        assert f'id="fsl_sage.api.{name}"' in api, name
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img|source|iframe)[^>]*?(?:src|href|srcset)="(https?:[^"]*)"', page.read_text()
        )
        assert not loaded, page

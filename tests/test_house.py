"""Imports go one way: a room imports only the rooms below it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fsl_sage"

# From the top of the house down. Rooms of one floor do not import each other.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"__init__"},
    {"api"},
    {"compare", "deploy", "inference", "text", "watch"},
    {"report"},
    {"experiment"},
    {"engines"},
    {"algorithms"},
    {"roles"},
    {"alignment", "clock", "records"},
    {"wire"},
    {"problems"},
    {"split"},
    {"models"},
    {"config"},
    {"devices", "own_modules", "presets", "reading", "units"},
    {"activity", "errors", "optimizers", "precision", "seeding"},
]
FLOORS_OF_SPLIT = [{"__init__"}, {"auxiliaries", "costs"}, {"parts"}, {"plan"}, {"trace"}, {"errors"}]


def imports_of(file: Path) -> Iterator[str]:
    """The modules of the package that a file imports, by their full names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names = [node.module or ""]
            # `from package import module` imports the module; `from package import name` the package.
            names += [f"{node.module}.{alias.name}" for alias in node.names if is_module(f"{node.module}.{alias.name}")]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "fsl_sage")


def is_module(name: str) -> bool:
    path = SOURCE.parent / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def modules_under(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name below the package, file) of every module."""
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), file


def room_of(module: str) -> str:
    """The first part of a name below the package; the package itself is `__init__`."""
    return module.split(".")[0] if module else "__init__"


def floor_of(room: str, floors: list[set[str]]) -> int:
    found = [number for number, rooms in enumerate(floors) if room in rooms]
    assert found, f"{room} has no place in the order of imports"
    return found[0]


def against_the_order() -> set[tuple[str, str]]:
    found = set()
    for module, file in modules_under(SOURCE):
        here = room_of(module)
        for name in imports_of(file):
            there = room_of(name.removeprefix("fsl_sage").removeprefix("."))
            if there != here and floor_of(there, FLOORS) <= floor_of(here, FLOORS):
                found.add((module, there))
    return found


def test_no_import_goes_up() -> None:
    assert against_the_order() == set(), "these import a room that is not below them"


@pytest.mark.parametrize(
    ("room", "allowed"), [("wire", {"config", "errors", "precision", "seeding", "units"}), ("units", {"errors"})]
)
def test_rooms_that_know_little(room: str, allowed: set[str]) -> None:
    for module, file in modules_under(SOURCE):
        if room_of(module) == room:
            imported = {room_of(name.removeprefix("fsl_sage.")) for name in imports_of(file)}
            assert imported <= allowed | {room}, module


def test_an_engine_knows_algorithms_only_by_their_base() -> None:
    general = {"fsl_sage.algorithms", "fsl_sage.algorithms.base"}
    for module, file in modules_under(SOURCE / "engines"):
        assert {name for name in imports_of(file) if name.startswith("fsl_sage.algorithms")} <= general, module


def test_split_goes_from_the_trace_to_the_costs() -> None:
    for module, file in modules_under(SOURCE / "split"):
        here = module.split(".")[1] if "." in module else "__init__"
        for name in imports_of(file):
            if name.startswith("fsl_sage.split"):
                there = name.split(".")[2] if name.count(".") > 1 else "__init__"
                below = floor_of(there, FLOORS_OF_SPLIT) > floor_of(here, FLOORS_OF_SPLIT)
                assert here == there or below, f"{module} imports {name}"


def test_an_import_that_goes_up_is_found(tmp_path: Path) -> None:
    file = tmp_path / "made_up.py"
    file.write_text("from fsl_sage.cli import terminal\nimport fsl_sage.report.tables\nimport torch\n")
    assert list(imports_of(file)) == ["fsl_sage.cli", "fsl_sage.cli.terminal", "fsl_sage.report.tables"]
    with pytest.raises(AssertionError, match="no place in the order"):
        floor_of("attic", FLOORS)


def undocumented(node: ast.AST, name: str) -> Iterator[str]:
    """The public functions and classes below a node that have no docstring."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            if ast.get_docstring(child) is None:
                yield f"{name}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child, f"{name}.{child.name}")


def test_every_public_function_and_class_has_a_docstring() -> None:
    found = [
        name for module, file in modules_under(SOURCE) for name in undocumented(ast.parse(file.read_text()), module)
    ]
    assert not found, f"say what they are: {', '.join(found)}"

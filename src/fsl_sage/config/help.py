"""The help texts of options, which stand below the fields of dataclasses: for --help, and for Python's help()."""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def help_of(options: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, by field."""
    found: dict[str, str] = {}
    for kind in reversed(options.__mro__[:-1]):
        found |= dict(_docstrings(kind))
    return found


def _docstrings(kind: type) -> Iterator[tuple[str, str]]:
    body = _class_bodies(inspect.getmodule(kind)).get(kind.__qualname__, [])
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield ast.unparse(node.target), inspect.cleandoc(str(after.value.value))


@functools.cache
def _class_bodies(module: ModuleType | None) -> dict[str, list[ast.stmt]]:
    """The bodies of a module's classes by qualified name; its source is read once, because reading takes time."""
    try:
        return dict(_classes(ast.parse(inspect.getsource(module)), "")) if module else {}
    except (OSError, TypeError, SyntaxError):  # without a file, as in an interactive session
        return {}


def _classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, child.body
            yield from _classes(child, f"{prefix}{child.name}.")
        else:
            inner = f"{prefix}{child.name}.<locals>." if isinstance(child, ast.FunctionDef) else prefix
            yield from _classes(child, inner)


def explained(kind: Any) -> str:
    """All fields of a dataclass with their defaults and what they mean, those of its groups among them."""
    texts = help_of(kind)
    lines: list[str] = []
    for each in dataclasses.fields(kind):
        usual = _default(each)
        if dataclasses.is_dataclass(usual):
            lines.append(f"{each.name}: {type(usual).__name__}")
            lines.append(textwrap.indent(f"{explained(type(usual))}", "    "))
        else:
            lines.append(f"{each.name} = {usual!r}")
            lines.append(textwrap.indent(texts.get(each.name, ""), "    "))
    return "\n".join(line for line in lines if line)


def _default(each: dataclasses.Field) -> Any:
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    return None if each.default is dataclasses.MISSING else each.default


def document(target: Any, kind: Any) -> None:
    """Add the fields of a dataclass to what help() shows of a class or a function; doing it twice changes nothing."""
    own = inspect.cleandoc(target.__doc__ or "").partition("\n\nOptions:\n")[0]
    target.__doc__ = f"{own}\n\nOptions:\n{textwrap.indent(explained(kind), '    ')}\n"

"""The structure of what a module takes or returns, as text; torch's own way knows no namedtuples."""

import re
import sys
from functools import reduce
from typing import Any

from torch.utils import _pytree as pytree

_NAME = re.compile(r"namedtuple ([\w.]+):([\w.<>]+)")


def dump_structure(structure: pytree.TreeSpec) -> str:
    """The structure as text. Raises a NotImplementedError if it holds a type that torch cannot write down."""
    _register(structure)
    return pytree.treespec_dumps(structure)


def load_structure(text: str) -> pytree.TreeSpec:
    """The structure that a plan has written down.

    A namedtuple is looked up in modules that are imported already, as that of the model is: a plan may come from
    another machine, and nothing is imported because it says so.
    """
    for module, name in _NAME.findall(text):
        start: Any = sys.modules.get(module)
        found = reduce(lambda owner, part: getattr(owner, part, None), name.split("."), start)
        if pytree.is_namedtuple_class(found):
            _register_class(found)
    return pytree.treespec_loads(text)


def _register(structure: pytree.TreeSpec) -> None:
    if pytree.is_namedtuple_class(structure.context):
        _register_class(structure.context)
    for child in structure.children():
        _register(child)


def _register_class(kind: Any) -> None:
    if kind not in pytree.SUPPORTED_SERIALIZED_TYPES:
        pytree._register_namedtuple(kind, serialized_type_name=f"namedtuple {kind.__module__}:{kind.__qualname__}")

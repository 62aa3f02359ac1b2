"""An algorithm's own options, as far as the configuration knows them: a dataclass that the algorithm's module makes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GivenOptions:
    """Options by name, before `fsl_sage.algorithms.resolve` has made the algorithm's dataclass of them."""

    values: Mapping[str, Any]
    of_several: bool = False
    """Whether they may be meant for several algorithms, as a preset's are: those of others are then left out."""
    source: str | None = field(default=None, compare=False)
    """The file that they come from, for an error."""


def all_options(options: Any) -> dict[str, Any]:
    """The options by name: those that are given, or all fields of an algorithm's dataclass."""
    if options is None:
        return {}
    if isinstance(options, GivenOptions):
        return dict(options.values)
    return {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}


def given_options(options: Any) -> dict[str, Any]:
    """The same without what has its default."""
    if not dataclasses.is_dataclass(options) or isinstance(options, GivenOptions):
        return all_options(options)
    usual = defaults_of(type(options))
    return {name: value for name, value in all_options(options).items() if name not in usual or value != usual[name]}


def defaults_of(kind: Any) -> dict[str, Any]:
    """The defaults of a dataclass by name; a field that must be given is left out."""
    usual = {}
    for each in dataclasses.fields(kind):
        if each.default is not dataclasses.MISSING:
            usual[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            usual[each.name] = each.default_factory()
    return usual

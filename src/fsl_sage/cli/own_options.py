"""Options of algorithms on the command line: they stand beside those that every run has."""

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from fsl_sage.algorithms import ALGORITHMS, Algorithm, find_algorithm, option_fields
from fsl_sage.algorithms.options import owners, refuse_foreign
from fsl_sage.cli.arguments import Flat
from fsl_sage.cli.words import read
from fsl_sage.config import Config, GivenOptions, all_options, convert, defaults_of
from fsl_sage.config.help import help_of

Arguments = TypeVar("Arguments")


class OwnOptions:
    """The options of one algorithm, or of several that a command takes together.

    Args:
        algorithms: Their names.
        compared: Whether they are compared: an algorithm then has no option for which another one stands.
    """

    def __init__(self, algorithms: Sequence[str], *, compared: bool = False) -> None:
        self._kinds = {name: find_algorithm(name) for name in algorithms}
        self._compared = compared

    @cached_property
    def _owners(self) -> dict[str, type[Algorithm]]:
        """By option, the first algorithm that has it."""
        found: dict[str, type[Algorithm]] = {}
        for kind in self._kinds.values():
            for name in option_fields(kind):
                if not (self._compared and name in kind.not_compared):
                    found.setdefault(name, kind)
        return found

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return {name: get_type_hints(kind.Options)[name] for name, kind in self._owners.items()}

    def parse(
        self, kind: type[Arguments], command: str, args: Sequence[str], base: Config, default: Arguments
    ) -> Arguments:
        """Read a command line.

        Args:
            kind: The command's arguments; their field `config` gets the options.
            command: The command, for --help.
            args: The words.
            base: The defaults of the configuration.
            default: The defaults of the other arguments.
        """
        config = self._config_class()
        parsed = _derived(kind, [("config", Annotated[config, Flat], field(default_factory=config))])
        shared = _values(base, Config) | self._defaults(base)
        usual = parsed(**{**_values(default, kind), "config": config(**{**shared, "options": None})})
        found: Any = read(parsed, command, args, usual)
        own = {name: getattr(found.config, name) for name in self._owners}
        chosen = Config(**{**_values(found.config, Config), "options": self._given(own, base)})
        return kind(**{**_values(found, kind), "config": chosen})

    def lists(self) -> set[str]:
        """The options that take several values."""
        return {name for name, hint in self._hints.items() if get_origin(hint) is tuple}

    def in_config(self, base: Config) -> Config:
        """The configuration with all options that can be given, as they are if none is."""
        return replace(base, options=self._given(self._defaults(base), base))

    def _given(self, own: Mapping[str, Any], base: Config) -> GivenOptions:
        """The options that were given, and those of the preset that no option could give: they may be mistakes."""
        values = {name: value for name, value in own.items() if value is not None or _accepts_none(self._hints[name])}
        rest = {name: value for name, value in all_options(base.options).items() if name not in self._owners}
        from_preset = base.options if isinstance(base.options, GivenOptions) else GivenOptions({}, of_several=True)
        strict = not from_preset.of_several and base.algorithm in self._kinds
        return GivenOptions({**rest, **values}, of_several=not strict, source=from_preset.source if rest else None)

    def _defaults(self, base: Config) -> dict[str, Any]:
        """By option its value if it is not given: the preset's, else the algorithm's; None where it must be given."""
        preset = all_options(base.options)
        found = {}
        for name, kind in self._owners.items():
            usual = defaults_of(kind.Options).get(name)
            found[name] = convert(preset[name], self._hints[name], name) if name in preset else usual
        return found

    def _config_class(self) -> Any:
        """The configuration with the algorithms' options as fields, for tyro."""
        named = tyro.conf.arg(
            help=f"{', '.join(ALGORITHMS)}, or MODULE:CLASS, your own. Its own options are shown by --algorithm NAME "
            "--help."
        )
        rows: list[tuple[str, Any, Any]] = [
            ("algorithm", Annotated[str, named], field(default=Config.algorithm)),
            ("options", Annotated[Any, tyro.conf.Suppress], field(default=None)),
        ]
        for name, kind in self._owners.items():
            hint = self._hints[name]
            usual = defaults_of(kind.Options).get(name)
            hint = hint if usual is not None or _accepts_none(hint) else hint | None
            shown = tyro.conf.arg(help=f"{help_of(kind.Options).get(name, '')} [{self._names_of(name)}]".strip())
            rows.append((name, Annotated[hint, shown], field(default=usual)))
        return _derived(Config, rows)

    def _names_of(self, path: str) -> str:
        return ", ".join(name for name, kind in self._kinds.items() if path in option_fields(kind))

    def refuse_others(self, args: Sequence[str]) -> None:
        """Refuse options of other algorithms, with the reason."""
        for word in args:
            if word.startswith("--"):
                path = word.partition("=")[0].removeprefix("--").replace("-", "_")
                for name in (path, path.removeprefix("no_")):
                    if name not in self._owners and owners(name):
                        refuse_foreign([name], self._kinds, compared=self._compared)


def _accepts_none(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _derived(kind: Any, rows: Sequence[tuple[str, Any, Any]]) -> Any:
    """A dataclass with some fields more, or of another type."""
    derived = make_dataclass(kind.__name__, rows, bases=(kind,), frozen=True)
    derived.__doc__ = kind.__doc__
    return derived


def _values(holder: Any, kind: Any) -> dict[str, Any]:
    return {each.name: getattr(holder, each.name) for each in fields(kind)}

"""A configuration as plain values: for JSON, from TOML and presets, and as a fingerprint."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from fsl_sage.config.fields import NO_PART_OF_THE_RESULT, Config, DataConfig, default_config
from fsl_sage.config.own_options import GivenOptions, all_options, given_options
from fsl_sage.config.values import convert
from fsl_sage.errors import InputError, nearest
from fsl_sage.reading import read_toml, short

OPTIONS = "options"
"""The field of a configuration that holds the algorithm's own options; as plain values they stand beside the others."""


RESPELLED = {"weighting": "averaging.weighting"}
"""Options of every run that have moved: by the older spelling, which goes on working, the newer one."""


def respelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with the newer spellings of options that have moved."""
    found = dict(values)
    for old, new in RESPELLED.items():
        if old not in values:
            continue
        group, name = new.split(".")
        own = found.get(group, {})
        if not isinstance(own, Mapping):
            continue  # refused where the group is read
        if name in own and own[name] != values[old]:
            raise InputError(f"'{old}' is an older spelling of '{new}', and they differ: give '{new}' alone.")
        found[group] = {**own, name: found.pop(old)}
    return found


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values only, fit for JSON; the algorithm's own options stand beside the others."""
    if not isinstance(config, Config):
        return _plain(dataclasses.asdict(config))
    shared = dataclasses.asdict(dataclasses.replace(config, options=None))
    del shared[OPTIONS]
    return _plain({**shared, **all_options(config.options)})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted path: {"data": {"alpha": 1}} is {"data.alpha": 1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values, default=str))


def from_dict(values: Mapping[str, Any], base: Any = None, path: str = "") -> Any:
    """The configuration with `values` (nested, as in TOML or JSON) in the place of `base`'s.

    At the top level a name that is no field of the configuration is an option of the algorithm, which the algorithm
    itself checks (`fsl_sage.algorithms.resolve`). Other unknown names are refused.
    """
    base = default_config(_data_of(values)) if base is None else base
    values = respelled(values) if isinstance(base, Config) else values
    hints = get_type_hints(type(base))
    hints.pop(OPTIONS, None)
    changes: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints and isinstance(base, Config) and not isinstance(value, Mapping) and key != OPTIONS:
            own[key] = value
        else:
            changes[key] = _value(key, value, hints, base, path)
    if own:
        changes[OPTIONS] = GivenOptions({**given_options(base.options), **own})
    return dataclasses.replace(base, **changes)


def known_values(values: Mapping[str, Any], kind: Any = Config) -> dict[str, Any]:
    """Of nested values that another version may have written down, those of options that there are today."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name != OPTIONS}
    known = {key: value for key, value in values.items() if key in hints}
    groups = {
        key for key, value in known.items() if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping)
    }
    return {key: known_values(value, hints[key]) if key in groups else value for key, value in known.items()}


def _value(key: str, value: Any, hints: Mapping[str, Any], base: Any, path: str) -> Any:
    if key not in hints:
        raise InputError(f"'{short(path + key)}' is not an option{nearest(key, sorted(hints), '; there are')}")
    if not dataclasses.is_dataclass(hints[key]):
        return convert(value, hints[key], path + key)
    if not isinstance(value, Mapping):
        raise InputError(f"'{path}{key}' is a group of options: write it as a table [{path}{key}].")
    return from_dict(value, getattr(base, key), f"{path}{key}.")


def _data_of(values: Mapping[str, Any]) -> str:
    data = values.get("data")
    return str(data["name"]) if isinstance(data, Mapping) and "name" in data else DataConfig.name


PRESETS = Path(__file__).parent.parent / "presets"


def preset_names() -> list[str]:
    """The presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def read_preset(name_or_path: str | Path) -> dict[str, Any]:
    """The values of a preset by name ("paper") or of a TOML file, as they are written there."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = PRESETS / f"{name_or_path}.toml"
        if not path.exists():
            raise InputError(
                f"There is no preset '{name_or_path}'{nearest(name_or_path, preset_names(), '; there are')}"
            )
    try:
        return read_toml(path)
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None


def load_preset(name_or_path: str | Path, base: Config | None = None) -> Config:
    """The configuration in a preset.

    A preset that names no algorithm may have options of several: each takes its own.

    Args:
        name_or_path: The name of a preset of the package, or a TOML file whose keys are the options. A table [compare],
            the grid of `compare`, is ignored.
        base: The values of options that the preset does not have; the defaults of its data set if not given.
    """
    values = read_preset(name_or_path)
    values.pop("compare", None)
    try:
        config: Config = from_dict(values, base)
    except InputError as error:
        raise InputError(f"{name_or_path}: {error}") from None
    return from_file(config, str(name_or_path), of_several="algorithm" not in values)


def from_file(config: Config, source: str, *, of_several: bool) -> Config:
    """The configuration with a note on the file that its algorithm's options come from.

    Args:
        config: As `from_dict` made it of the file.
        source: The file's name, for errors.
        of_several: Whether options of other algorithms are left out instead of refused.
    """
    if not isinstance(config.options, GivenOptions):
        return config
    return dataclasses.replace(config, options=GivenOptions(config.options.values, of_several, source))


def digest(config: Config) -> str:
    """A fingerprint of all that decides the numbers of a run.

    What has its default is left out, so that an option which a later version adds does not make it another run.
    """
    shared = dataclasses.replace(config, options=None)
    values = _differing(to_dict(shared), to_dict(Config())) | _plain(given_options(config.options))
    values = {key: value for key, value in values.items() if key not in NO_PART_OF_THE_RESULT}
    return hashlib.sha256(json.dumps(_first_spelled(values), sort_keys=True).encode()).hexdigest()[:16]


def _first_spelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """With the older spellings of options that have moved, so that the digests of older runs hold."""
    found = dict(values)
    for old, new in RESPELLED.items():
        group, name = new.split(".")
        own = dict(found.pop(group, {}))
        found |= {old: own.pop(name)} if name in own else {}
        found |= {group: own} if own else {}
    return found


def _differing(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not the usual ones; of a group, those in it."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {key: own} if (own := _differing(value, usual[key])) else {}
        elif value != usual[key]:
            found[key] = value
    return found

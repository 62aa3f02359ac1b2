"""A configuration seen as flat options: which of them a comparison varies, and which algorithms they concern."""

from collections.abc import Mapping
from typing import Any

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.algorithms.fsl_sage import FSLSAGE
from fsl_sage.config import NO_PART_OF_THE_RESULT, Config, to_dict

HETEROGENEITY = "heterogeneity"
"""The one name under which the partition and its parameter are compared."""
IID = "iid"

# What distinguishes the runs of a series, or says where and how a run was computed: never a setting.
NO_SETTING = {"algorithm", "seed", "device", "threads", "data.dir", *NO_PART_OF_THE_RESULT}
_PARTITION = {"data.partition", "data.alpha", "data.shards_per_client"}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted path: {"data": {"alpha": 1}} is {"data.alpha": 1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def nest(path: str, value: Any) -> dict[str, Any]:
    """The nested values with one option in them."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def option_path(name: str) -> str:
    """An option as a person writes it (--align-every, align_every, model.auxiliary) as a field's path."""
    return name.strip().removeprefix("--").replace("-", "_")


def options_of(config: Config) -> dict[str, Any]:
    """All options by path, as plain values."""
    return flatten(to_dict(config))


def recorded_options(config: Config) -> dict[str, Any]:
    """The options, by path, that can change what a run of this algorithm writes down."""
    also = {"align_until", "alignment.samples"}  # single runs of fsl-sage; the samples by which fidelity is measured
    return {
        path: value
        for path, value in options_of(config).items()
        if path not in NO_PART_OF_THE_RESULT and (path in also or concerns(config.algorithm, path))
    }


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that may be a setting of a comparison; the partition is one of them, as `heterogeneity`."""
    kept = {path: value for path, value in options.items() if path not in NO_SETTING | _PARTITION}
    return {HETEROGENEITY: heterogeneity(options), **kept}


def heterogeneity(options: Mapping[str, Any]) -> str:
    """The partition as it stands in the names of runs: iid, alpha0.1 or shards2."""
    partition = options["data.partition"]
    if partition == "dirichlet":
        return f"alpha{options['data.alpha']:g}"
    return f"shards{options['data.shards_per_client']}" if partition == "shards" else str(partition)


def dirichlet_alpha(name: str) -> float | None:
    """The alpha behind a heterogeneity: iid is the limit of large alpha; None for shards."""
    if name == IID:
        return float("inf")
    return float(name.removeprefix("alpha")) if name.startswith("alpha") else None


def concerns(algorithm: str, path: str) -> bool:
    """Whether an option can change a run of this algorithm.

    In a comparison `align_until` is lazy-fsl-sage's alone: fsl-sage beside it aligns to the end.
    """
    kind = ALGORITHMS.get(algorithm)
    if kind is None:
        return True
    if path == "align_until":
        return algorithm == "lazy-fsl-sage"
    if path in ("align_every", "warm_start") or path.startswith("alignment."):
        return issubclass(kind, FSLSAGE)
    if path == "optimizer.server_lr":
        return kind.has_s_server
    if path in ("model.auxiliary", "upload_every"):
        return "auxiliary" in kind.holds
    return True

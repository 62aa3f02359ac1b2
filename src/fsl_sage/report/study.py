"""What a set of runs compares: settings, series of runs that differ in the seed only, and their statistics."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fsl_sage.algorithms.looks import place_of, variant_of
from fsl_sage.config import option
from fsl_sage.errors import listed
from fsl_sage.problems.score import Score
from fsl_sage.records.subject import subject
from fsl_sage.report.load import Run
from fsl_sage.report.metric import COSINE, LOSS, NMSE, Metric
from fsl_sage.report.options import HETEROGENEITY, concerns, dirichlet_alpha, has_option, settings_of
from fsl_sage.report.style import style, value_name

_OF_TASK = ("clients", "cohort", "model.name", HETEROGENEITY)
"""Options that decide what is learnt and by which clients, besides those of the data."""
_OF_EFFORT = ("rounds", "batch_size", "local_epochs", "local_steps")
"""Options by which one algorithm may have been given more than another."""


class Spread(NamedTuple):
    """Mean and standard deviation over seeds (n - 1; 0 for one seed)."""

    mean: float
    std: float
    seeds: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return Spread(float(np.mean(values)), std, len(values))


class Curve(NamedTuple):
    """A metric over the rounds, in its unit; each array is [rounds], x-axes are means over the seeds."""

    rounds: np.ndarray
    gib: np.ndarray
    whole_gib: np.ndarray
    seconds: np.ndarray
    mean: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class Setting:
    """Values of the options that vary, by path."""

    values: Mapping[str, Any]

    @property
    def label(self) -> str:
        """For people; empty where nothing varies."""
        return ", ".join(value_name(path, value) for path, value in self.values.items())

    def without(self, *paths: str) -> "Setting":
        """The setting with some of its options left open."""
        return Setting({path: value for path, value in self.values.items() if path not in paths})

    def covers(self, other: "Setting") -> bool:
        """Whether this setting has every value that the other one has."""
        return other.values.items() <= self.values.items()


@dataclass(frozen=True)
class Series:
    """The runs of one algorithm in one setting, which differ in the seed only."""

    algorithm: str
    """Its name, with the switches of a variant."""
    setting: Setting
    """Only the options that concern this algorithm."""
    all_runs: tuple[Run, ...]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The finished ones; all of them while none is finished."""
        return tuple(run for run in self.all_runs if run.stopped) or self.all_runs

    @property
    def rounds(self) -> int:
        """Rounds that every run has finished."""
        return min(len(run.metrics) for run in self.runs)

    def has(self, metric: Metric) -> bool:
        """Whether the runs recorded it."""
        return bool(np.isfinite(self.curve(metric).mean).any())

    def curve(self, metric: Metric) -> Curve:
        """Mean and spread over the seeds, as far as all of them went."""
        values = self._stacked(lambda run: run.values(metric.key)) * metric.scale
        std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(self.rounds)
        gib, whole, seconds = (
            self._stacked(read).mean(axis=0)
            for read in (lambda run: run.gib, lambda run: run.whole_gib, lambda run: run.values("elapsed_seconds"))
        )
        return Curve(np.arange(1, self.rounds + 1), gib, whole, seconds, values.mean(axis=0), std)

    def _stacked(self, read: Callable[[Run], np.ndarray]) -> np.ndarray:
        return np.stack([read(run)[: self.rounds] for run in self.runs])

    def best(self, metric: Metric, within_gib: float = np.inf) -> Spread | None:
        """The best of each run within an amount of communication; None if that is less than a round."""
        values = [run.values(metric.key)[run.gib <= within_gib * (1 + 1e-9)] * metric.scale for run in self.runs]
        if any(not np.isfinite(each).any() for each in values):
            return None
        return spread([metric.best(each) for each in values])

    def final(self, metric: Metric) -> Spread | None:
        """The last of each run."""
        values = [run.values(metric.key)[-1] * metric.scale for run in self.runs]
        return spread(values) if np.isfinite(values).all() else None

    def gib_of_best(self, metric: Metric) -> float:
        """GiB moved when a run was at its best, mean over the seeds."""
        pick = np.nanargmax if metric.higher_is_better else np.nanargmin
        return float(np.mean([run.gib[pick(run.values(metric.key))] for run in self.runs]))

    def step(self, name: str) -> int | None:
        """What a step of a role took, such as `client_working_bytes`: the most of any seed; None if unknown."""
        found = [value for run in self.runs if (value := run.once(name)) is not None]
        return max(found, default=None)

    def step_memory(self, role: str) -> int | None:
        """Static and working bytes of a step of a role together."""
        static, working = (self.step(f"{role}_{kind}_bytes") for kind in ("static", "working"))
        return None if static is None or working is None else static + working

    def rounds_within(self, gib: float) -> int:
        """Rounds that every run has finished within an amount of communication."""
        return min(int((run.gib <= gib * (1 + 1e-9)).sum()) for run in self.runs)

    @property
    def least_gib(self) -> float:
        """GiB that every run has moved, by the paper's convention."""
        return float(min(run.gib[-1] for run in self.runs))

    @property
    def moved_gib(self) -> float:
        """GiB moved in all, by the paper's convention, mean over the seeds."""
        return float(np.mean([run.gib[-1] for run in self.runs]))

    def reaching(self, metric: Metric, target: float) -> list[tuple[int, float]]:
        """(rounds, GiB) to reach a target, of each run that does; the target is a value as it was measured."""
        found = []
        for run in self.runs:
            places = np.flatnonzero(metric.reaches(run.values(metric.key), target))
            if len(places):
                found.append((int(places[0]) + 1, float(run.gib[places[0]])))
        return found

    def computation_seconds(self, rounds: int) -> float:
        """Measured time of the first rounds; of each the median over runs, for other work may have slowed one."""
        return float(np.median([run.values("seconds")[:rounds] for run in self.runs], axis=0).sum())

    def communication_seconds(self, rounds: int, bandwidth: float) -> float:
        """Time that the first rounds take on the wire at `bandwidth` Mbit/s for each client, all clients in parallel.

        In every round the client that moves most sets the time: its bytes up and down over the bandwidth, with labels
        and, before round 0, the first download.
        """
        return float(np.mean([run.busiest_bytes[: rounds + 1].sum() * 8 / (bandwidth * 1e6) for run in self.runs]))


@dataclass(frozen=True)
class Study:
    """All runs, sorted."""

    runs: tuple[Run, ...]
    varying: tuple[str, ...]
    """Options that differ between runs of the same algorithm, and options of the task that differ at all."""
    series: tuple[Series, ...]
    settings: tuple[Setting, ...]
    """Where algorithms are compared. An algorithm that an option does not concern is in every setting of it."""
    repeated: tuple[tuple[Run, Run], ...] = ()
    """Runs that are not counted, each with the one of the same options and seed that is."""

    def unequal(self) -> list[str]:
        """Sentences on settings in which one algorithm has other rounds or batches than another."""
        told = []
        for setting in self.settings:
            for path in _OF_EFFORT:
                by_value: dict[Any, list[str]] = defaultdict(list)
                for series in self.within(setting):
                    for value in dict.fromkeys(run.options.get(path) for run in series.runs):
                        by_value[value].append(style(series.algorithm).name)
                if len(by_value) > 1:
                    each = "; ".join(f"{value} for {listed(names)}" for value, names in by_value.items())
                    told.append(f"{option(path)} is not the same for all{_where(setting)}: {each}.")
        return told

    @property
    def algorithms(self) -> list[str]:
        """In the order of every legend."""
        return sorted({series.algorithm for series in self.series}, key=lambda name: (place_of(name), name))

    @property
    def subject(self) -> str:
        """Model, data, partition and clients, as far as all runs have them in common; settings tell the rest."""
        return subject([run.options for run in self.runs])

    def within(self, setting: Setting) -> list[Series]:
        """The series that are compared in a setting."""
        found = [series for series in self.series if setting.covers(series.setting)]
        return sorted(found, key=lambda series: (place_of(series.algorithm), series.algorithm))

    def grouped(self, *paths: str) -> list[tuple[Setting, list[Setting]]]:
        """The settings with some options left open, and those that differ in these alone."""
        groups: dict[tuple[Any, ...], tuple[Setting, list[Setting]]] = {}
        for setting in self.settings:
            rest = setting.without(*paths)
            groups.setdefault(tuple(rest.values.items()), (rest, []))[1].append(setting)
        return list(groups.values())

    def of(self, algorithm: str, setting: Setting) -> Series | None:
        """The series of an algorithm in a setting."""
        return next((each for each in self.within(setting) if each.algorithm == algorithm), None)

    def has(self, metric: Metric) -> bool:
        """Whether any run recorded it."""
        return any(series.has(metric) for series in self.series)

    @property
    def has_frozen_weights(self) -> bool:
        """Whether it makes a difference if models are counted whole."""
        return any(not np.array_equal(run.gib, run.whole_gib) for run in self.runs)

    @property
    def score(self) -> Score:
        """The headline score of the runs; of most of them, where they differ."""
        scores = [run.score for run in self.runs]
        return max(scores, key=scores.count)

    @property
    def main_metric(self) -> Metric:
        """What algorithms are judged by: the headline score, or the loss of runs without it."""
        headline = Metric.of(self.score)
        return headline if self.has(headline) else LOSS

    @property
    def curves(self) -> list[Metric]:
        """The scores that the runs recorded: the headline score and the loss."""
        return [metric for metric in dict.fromkeys((Metric.of(self.score), LOSS)) if self.has(metric)]

    @property
    def fidelities(self) -> list[Metric]:
        """How well cut gradients were estimated, as far as the runs recorded it."""
        return [metric for metric in (COSINE, NMSE) if self.has(metric)]


def make_study(runs: Sequence[Run]) -> Study:
    """Sort runs into series and settings."""
    options = [settings_of(run.options) for run in runs]
    values: dict[tuple[str, str], set[Any]] = defaultdict(set)
    for run, own in zip(runs, options, strict=True):
        for path, value in own.items():
            if concerns(run.algorithm, path) or has_option(run.algorithm, path):
                values[run.algorithm, path].add(_hashable(value))
    switches = _switches(values)
    varying = sorted(_varying(values) - switches, key=_place_of_option)
    order = _order_of_values(runs, options)
    groups: dict[tuple[str, tuple[Any, ...]], list[Run]] = defaultdict(list)
    counted: dict[tuple[Any, ...], Run] = {}
    repeated: list[tuple[Run, Run]] = []
    # A finished run counts before an unfinished one of the same options and seed.
    for run, own in sorted(zip(runs, options, strict=True), key=lambda each: each[0].stopped is None):
        name = run.algorithm
        # Single runs may differ in an option for which another algorithm stands in a comparison.
        parting = [path for path in varying if path in own and (concerns(name, path) or len(values[name, path]) > 1)]
        variant = variant_of(name, sorted(path for path in switches if own.get(path) is True))
        group = variant, tuple((path, _hashable(own.get(path))) for path in parting)
        first = counted.setdefault((*group, run.seed), run)
        if first is run:
            groups[group].append(run)
        else:
            repeated.append((run, first))
    series = [Series(name, Setting(dict(own)), tuple(members)) for (name, own), members in groups.items()]
    series.sort(key=lambda each: (order(each.setting), place_of(each.algorithm), each.algorithm))
    return Study(tuple(runs), tuple(varying), tuple(series), _meeting_points(series), tuple(repeated))


def _varying(values: Mapping[tuple[str, str], set[Any]]) -> set[str]:
    """Options that differ between runs of one algorithm; those of the task, also between algorithms.

    Each algorithm may have a learning rate of its own and still be compared with the others; data of its own, not.
    """
    within = {path for (_, path), seen in values.items() if len(seen) > 1}
    of_task = {path for _, path in values if path in _OF_TASK or path.startswith("data.")}
    seen = {path: set().union(*(own for (_, other), own in values.items() if other == path)) for path in of_task}
    return within | {path for path in of_task if len(seen[path]) > 1}


def _switches(values: Mapping[tuple[str, str], set[Any]]) -> set[str]:
    """Options of one of several algorithms that some of its runs have switched on and others off.

    The other algorithms do not have them, so they are no setting in which algorithms meet: they make two variants of
    that algorithm, which are compared with the others side by side.
    """
    owners: dict[str, set[str]] = defaultdict(set)
    for algorithm, path in values:
        if has_option(algorithm, path):
            owners[path].add(algorithm)
    several = len({algorithm for algorithm, _ in values}) > 1
    switched = {
        path
        for (_, path), seen in values.items()
        if seen == {False, True} and all(isinstance(value, bool) for value in seen)
    }
    return {path for path in switched if several and len(owners[path]) == 1}


def _meeting_points(series: Sequence[Series]) -> tuple[Setting, ...]:
    """The settings that no other one covers."""
    unique = {tuple(each.setting.values.items()): each.setting for each in series}
    settings = list(unique.values())
    most = [
        setting for setting in settings if not any(other is not setting and other.covers(setting) for other in settings)
    ]
    return tuple(most)


def _where(setting: Setting) -> str:
    return f" in {setting.label}" if setting.label else ""


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _place_of_option(path: str) -> tuple[int, str]:
    first = ("data.name", "model.name", HETEROGENEITY)
    return (first.index(path) if path in first else len(first), path)


def _order_of_values(runs: Sequence[Run], options: Sequence[Mapping[str, Any]]) -> Callable[[Setting], Any]:
    """Heterogeneity rising, auxiliaries by size, numbers by value, the rest by name."""
    sizes = {
        own["model.auxiliary"]: run.auxiliary_bytes
        for run, own in zip(runs, options, strict=True)
        if run.auxiliary_bytes is not None
    }

    def key(path: str, value: Any) -> tuple[float, str]:
        if path == HETEROGENEITY:
            alpha = dirichlet_alpha(value)
            return (0.0 if alpha is None else -alpha, str(value))
        if path == "model.auxiliary":
            return (float(sizes.get(value, 0)), str(value))
        number = float(value) if isinstance(value, int | float) else -1.0 if value is None else np.inf
        return (number, str(value))

    return lambda setting: [(path, key(path, value)) for path, value in setting.values.items()]

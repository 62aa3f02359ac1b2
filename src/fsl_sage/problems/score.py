"""The headline score: the number that a problem is judged by."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsl_sage.errors import InputError


@dataclass(frozen=True)
class Score:
    """A metric of every round, and which of its values are good."""

    name: str
    """Its name among the metrics that `Task.summarise` gives, such as test_accuracy."""
    higher_is_better: bool = True
    percent: bool = False
    """Whether it is a fraction, which people read as a percentage."""

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and bool(self.name.strip())
        if not named or not isinstance(self.higher_is_better, bool) or not isinstance(self.percent, bool):
            raise InputError(
                f"Score({self.name!r:.60}, {self.higher_is_better!r:.20}, {self.percent!r:.20}) is not possible: give "
                "a name, and whether higher is better and whether it is a fraction, as True or False."
            )

    @property
    def title(self) -> str:
        """For people: test accuracy."""
        return self.name.replace("_", " ")

    @property
    def short(self) -> str:
        """For narrow columns: accuracy."""
        return self.title.removeprefix("test ")

    def text(self, value: float | None, digits: int = 1) -> str:
        """A value for people: a percentage with so many digits, or a number; empty for None."""
        if value is None:
            return ""
        return f"{value:.{digits}%}" if self.percent else f"{value:.{digits + 3}g}"

    def best(self, values: Iterable[float]) -> float:
        """The best of some values."""
        return max(values) if self.higher_is_better else min(values)

    def best_of(self, metrics: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Of the metrics of several rounds, those of the best round; the first of equals."""
        pick = max if self.higher_is_better else min
        return pick(metrics, key=lambda line: line[self.name])

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as the target, or better."""
        return value >= target if self.higher_is_better else value <= target

    def check_target(self, target: float | None, option: str) -> None:
        """Refuse a target that no value can reach."""
        if target is not None and self.percent and not 0 < target <= 1:
            raise InputError(f"{option} {target:g} is not possible: give a fraction above 0, at most 1.")


ACCURACY = Score("test_accuracy", percent=True)
"""The fraction of the test set that is classified, or predicted, right."""

"""The headline score: the number that a problem is judged by."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsl_sage.errors import InputError

RECORDED = (
    *("round", "theory", "cohort", "missing", "failures", "rejected", "seconds", "elapsed_seconds"),
    *("train_loss", "auxiliary_loss", "aligned", "alignment_skipped", "codec_memory_bytes"),
    *("fidelity_cosine", "fidelity_nmse", "fidelity_cosine_seen", "fidelity_nmse_seen"),
    *("fidelity_parameters_cosine", "fidelity_parameters_cosine_true"),
    *("bytes_paper", "bytes_total", "bytes_whole_models"),
    *("client_static_bytes", "client_working_bytes", "client_step_flops"),
    *("server_static_bytes", "server_working_bytes", "server_step_flops"),
)
"""What every run records of a round itself, by the names of docs/metrics.md: no task may give a metric such a name."""
LONGEST_NAME = 100
"""Letters. A file is named after the score, and file systems take 255 bytes."""


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
        self._check_name()

    def _check_name(self) -> None:
        """Refuse a name that no column and no file can have, or that something else has."""
        given = f"Score({self.name!r:.60}) is not possible"
        if len(self.name) > LONGEST_NAME or not self.name.isprintable() or self.name != self.name.strip():
            raise InputError(
                f"{given}: give a name of at most {LONGEST_NAME} letters, in one line and without spaces at its ends."
            )
        if self.name in RECORDED or self.name.endswith("_recalibrated"):
            raise InputError(
                f"{given}: every run records a metric of its own under this name. Give another one, such as test_error."
            )
        if self.short in ("classes", "theory") or self.name.startswith("test_class_"):
            raise InputError(
                f"{given}: a run writes {self.short.replace(' ', '_')} of its own under this name. Give another one, "
                "such as test_error."
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

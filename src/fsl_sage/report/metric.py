"""What a report draws and judges by: numbers of every round, with their labels and units."""

from dataclasses import dataclass

import numpy as np

from fsl_sage.problems import score
from fsl_sage.problems.score import Score
from fsl_sage.records.files import as_file_name


@dataclass(frozen=True)
class Metric:
    """A number of every round."""

    key: str
    label: str
    unit: str = ""
    scale: float = 1.0
    higher_is_better: bool = True

    @property
    def axis(self) -> str:
        """The label of an axis."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @classmethod
    def of(cls, score: Score) -> "Metric":
        """A headline score as it is drawn: a fraction in percent."""
        unit, scale = ("%", 100.0) if score.percent else ("", 1.0)
        return cls(score.name, score.title, unit, scale, score.higher_is_better)

    @property
    def short(self) -> str:
        """For narrow places."""
        return self.label.removeprefix("test ")

    @property
    def file_name(self) -> str:
        """For names of figures and tables."""
        return as_file_name(self.key.removeprefix("test_").replace("_", "-")) or "score"

    def text(self, value: float) -> str:
        """A value as it was measured, in the metric's unit."""
        return f"{self.scale * value:g} {self.unit}".rstrip()

    def reaches(self, values: np.ndarray, target: float) -> np.ndarray:
        """Which values, as they were measured, are as good as a target."""
        return values >= target if self.higher_is_better else values <= target

    def best(self, values: np.ndarray) -> float:
        """The best of some values."""
        return float(np.nanmax(values) if self.higher_is_better else np.nanmin(values))


ACCURACY = Metric.of(score.ACCURACY)
LOSS = Metric("test_loss", "test loss", higher_is_better=False)
COSINE = Metric("fidelity_cosine", "cosine of estimated and true cut gradients")
NMSE = Metric("fidelity_nmse", "NMSE of estimated cut gradients", higher_is_better=False)

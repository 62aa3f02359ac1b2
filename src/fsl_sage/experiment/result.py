"""What a finished run gives back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.records.run_directory import RunDirectory


@dataclass(frozen=True)
class Result:
    """A finished run."""

    directory: Path
    config: Config
    metrics: list[dict[str, Any]]
    """One dict a round, as in metrics.jsonl."""
    stopped: str
    """Which stop rule ended the run."""

    score: Score = ACCURACY
    """The headline score: its name among the metrics, and its direction."""

    @property
    def best_score(self) -> float:
        """The best headline score of any round."""
        return self.score.best(line[self.score.name] for line in self.metrics)

    @property
    def best_accuracy(self) -> float:
        """The same as `best_score`, under its name for images and texts."""
        return self.best_score

    def frame(self) -> Any:
        """The metrics as a DataFrame of pandas, a row for each round, if pandas is installed."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise InputError("Result.frame() needs pandas: pip install pandas. Result.metrics is a list.") from None
        return DataFrame(self.metrics).set_index("round")

    @property
    def model_file(self) -> Path:
        """The file with the final merged weights, a state_dict of the ordinary unsplit model."""
        return RunDirectory(self.directory).model_file

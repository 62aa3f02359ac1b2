"""Who is told of a run's progress: the display, and optional trackers. One small interface for all."""

from pathlib import Path
from typing import Any

from fsl_sage.config import Config, flatten, to_dict
from fsl_sage.errors import MissingExtra


class Tracker:
    """Told when a run starts, after every round, and when it ends."""

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """The run starts, or goes on after the rounds `done`."""

    def round(self, metrics: dict[str, Any]) -> None:
        """A round is over."""

    def finish(self, result: dict[str, Any]) -> None:
        """The run is over."""


class TensorBoard(Tracker):
    """Scalars by round, in DIR/tensorboard."""

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """Open a writer."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra("--track tensorboard", "track") from None
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=len(done))

    def round(self, metrics: dict[str, Any]) -> None:
        """One scalar for each number."""
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics["round"])

    def finish(self, result: dict[str, Any]) -> None:
        """Close the writer."""
        self._writer.close()


class MLflow(Tracker):
    """A run of MLflow; where it goes is MLflow's own setting (MLFLOW_TRACKING_URI)."""

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """Start or go on with the run named after the directory."""
        try:
            import mlflow
        except ImportError:
            raise MissingExtra("--track mlflow", "track") from None
        self._mlflow = mlflow
        known = directory / "mlflow-run-id"
        run = mlflow.start_run(run_id=known.read_text() if known.exists() else None, run_name=directory.name)
        known.write_text(run.info.run_id)
        if not done:
            mlflow.log_params(flatten(to_dict(config)))

    def round(self, metrics: dict[str, Any]) -> None:
        """All numbers of the round."""
        self._mlflow.log_metrics(numbers(metrics), step=metrics["round"])

    def finish(self, result: dict[str, Any]) -> None:
        """End the run."""
        self._mlflow.end_run()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}

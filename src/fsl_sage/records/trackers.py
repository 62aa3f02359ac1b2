"""One small interface for all that follow a run: the display, callbacks and optional trackers."""

from pathlib import Path
from typing import Any

from fsl_sage.config import NO_PART_OF_THE_RESULT, Config, flatten, to_dict
from fsl_sage.errors import MissingExtra


class Tracker:
    """Told when a run starts, after every round, and when it ends. Derive from it to follow a run.

    >>> class Patience(Tracker):
    ...     def start(self, config, directory, done):
    ...         self.losses = [line["test_loss"] for line in done]
    ...     def round(self, metrics):
    ...         self.losses.append(metrics["test_loss"])
    ...         if min(self.losses) < min(self.losses[-5:]):
    ...             raise StopRun("no better loss in 5 rounds")
    """

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """Called when the run starts, and again when it goes on from its last checkpoint after a loss of the S-server.

        Rounds after that checkpoint are played once more: forget what `round` has told, and begin with `done`.

        Args:
            config: Everything that decides the run.
            directory: The run's directory.
            done: The metrics of rounds that were played before, if the run is resumed or goes on after a loss.
        """

    def round(self, metrics: dict[str, Any]) -> None:
        """Called after every round with its metrics, as in metrics.jsonl. May raise `StopRun`."""

    def activity(self, doing: str) -> None:
        """Called often, perhaps from another thread, with what the run does now, such as "training client 3 of 10"."""

    def finish(self, result: dict[str, Any]) -> None:
        """Called at the end of the run with what result.json has."""

    def close(self) -> None:
        """Called last, however the run has ended: also after an error or an interrupt."""


class StopRun(Exception):  # noqa: N818
    """Raise it in a callback's `round` to end the run after this round, as a stop rule does.

    >>> raise StopRun("no progress in 5 rounds")
    """

    def __init__(self, reason: str = "a callback ended the run") -> None:
        super().__init__(reason)


class TensorBoard(Tracker):
    """Scalars by round, in DIR/tensorboard."""

    _writer: Any = None

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """Open a writer."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra("--track tensorboard", "track") from None
        self.close()  # the run may have started before
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=len(done))

    def round(self, metrics: dict[str, Any]) -> None:
        """One scalar for each number."""
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics["round"])

    def close(self) -> None:
        """Close the writer, if there is one."""
        if self._writer is not None:
            self._writer.close()


class MLflow(Tracker):
    """A run of MLflow; where it goes is MLflow's own setting (MLFLOW_TRACKING_URI)."""

    _mlflow: Any = None

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """Start or go on with the run named after the directory."""
        try:
            import mlflow
        except ImportError:
            raise MissingExtra("--track mlflow", "track") from None
        self.close()  # the run may have started before
        self._mlflow = mlflow
        known = directory / "mlflow-run-id"
        begun = known.read_text() if known.exists() else None
        run = mlflow.start_run(run_id=begun, run_name=directory.name)
        self._status = "KILLED"  # unless it is finished
        known.write_text(run.info.run_id)
        if begun is None:
            options = flatten({k: v for k, v in to_dict(config).items() if k not in NO_PART_OF_THE_RESULT})
            mlflow.log_params(options)  # which MLflow does not allow to change

    def round(self, metrics: dict[str, Any]) -> None:
        """All numbers of the round."""
        self._mlflow.log_metrics(numbers(metrics), step=metrics["round"])

    def finish(self, result: dict[str, Any]) -> None:
        """The run has come to its end."""
        self._status = "FINISHED"

    def close(self) -> None:
        """End the run: another may start in this process."""
        if self._mlflow is not None:
            self._mlflow.end_run(self._status)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}

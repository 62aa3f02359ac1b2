"""A run: builds the roles from a configuration and plays the rounds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np

from fsl_sage.algorithms import resolve
from fsl_sage.algorithms.looks import colour_of
from fsl_sage.config import NO_PART_OF_THE_RESULT, Config, option
from fsl_sage.engines.base import Engine, LostError, Setup
from fsl_sage.engines.local import LocalEngine
from fsl_sage.engines.process import prefer_huge_pages
from fsl_sage.engines.setup import make_setup
from fsl_sage.errors import InputError, MissingExtra, RunWarning, TrainingError
from fsl_sage.experiment.federation import Federation, draw_cohort
from fsl_sage.models import save_adapters
from fsl_sage.records.figures import accuracy_figure, classes_figure
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.trackers import TRACKERS, Tracker
from fsl_sage.wire.ledger import GIB
from fsl_sage.wire.message import Tensors

BEYOND = 1000.0
"""No training that works ends with such a test loss: guessing among 50,000 words has 11."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    directory: Path
    config: Config
    metrics: list[dict[str, Any]]
    """One dict a round, as in metrics.jsonl."""
    stopped: str
    """Which stop rule ended the run."""

    @property
    def best_accuracy(self) -> float:
        """The best test accuracy of any round."""
        return max(line["test_accuracy"] for line in self.metrics)

    @property
    def model_file(self) -> Path:
        """The final merged weights, for the ordinary unsplit model."""
        return RunDirectory(self.directory).model_file


def run(config: Config, trackers: Sequence[Tracker] = ()) -> Result:
    """Train from the beginning, in a new run directory."""
    config = resolve(config)
    directory = RunDirectory.at(config)
    with directory.held():
        directory.begin(config)
        try:
            return play(directory, config, trackers)
        except InputError:
            directory.abandon()  # so that the corrected command may use the same directory
            raise


def resume(path: Path, trackers: Sequence[Tracker] = (), workers: int | None = None, **changes: Any) -> Result:
    """Resume an interrupted run from its last checkpoint, exactly as if never interrupted.

    `changes` are other options that decide no number, such as `engine` or `ray_address`.
    """
    directory = RunDirectory(path)
    config = resolve(directory.config())
    decisive = sorted(set(changes) - set(NO_PART_OF_THE_RESULT))
    if decisive:
        raise InputError(f"{', '.join(map(option, decisive))} cannot change when a run goes on: start a new run.")
    if workers is not None:
        changes["workers"] = workers
    if directory.finished():  # also where nothing can be locked, such as an archive of runs
        raise _is_finished(directory)
    with directory.held():
        if directory.finished():  # by another process, just now
            raise _is_finished(directory)
        return play(directory, replace(config, **changes), trackers)


def _is_finished(directory: RunDirectory) -> InputError:
    return InputError(f"{directory.path} is finished: its result is in {directory.result_file}.")


def play(
    directory: RunDirectory,
    config: Config,
    trackers: Sequence[Tracker],
    build: Callable[[RunDirectory, Config], Federation] | None = None,
) -> Result:
    """The run of a directory, from its last checkpoint to the end; `build` makes roles that are not all here."""
    with directory.held():
        return _play(directory, config, trackers, build or _build)


def _play(
    directory: RunDirectory,
    config: Config,
    trackers: Sequence[Tracker],
    build: Callable[[RunDirectory, Config], Federation],
) -> Result:
    prefer_huge_pages()  # before the data is loaded
    # 1. The roles: data, model, clients and servers; as they were at the last checkpoint, if there is one.
    federation, metrics = _restore(directory, config, build)
    trackers = [*trackers, *(TRACKERS[name]() for name in config.track)]
    lost = -1
    try:
        for tracker in trackers:
            tracker.start(config, directory.path, metrics)
        # 2. The rounds, until a stop rule is met.
        while True:
            t = len(metrics)
            try:
                if (stopped := stop_reason(config, metrics)) is not None:
                    model = federation.merged()
                    break
                metrics.append(_timed_round(federation, t, metrics))
                with directory.writing():
                    directory.append(metrics[-1], federation.ledger.written_in(t))
                    if (t + 1) % config.checkpoint_every == 0:
                        directory.save_checkpoint(config, *federation.checkpoint(t + 1))
            except LostError:
                if t == lost:
                    raise  # twice in the same round is no accident
                lost = t
                federation.engine.close()
                federation, metrics = _restore(directory, config, build)
                continue
            for tracker in trackers:
                tracker.round(metrics[-1])
        # 3. The final model, the figure, the result.
        colour = colour_of(config.algorithm)
        result = _summary(metrics, stopped)
        with directory.writing():
            accuracy_figure(directory.path / "accuracy.png", metrics, config.algorithm, colour)
            save_adapters(directory.adapter, config.model.name, config.lora, model)
            directory.finish(model, result, keep_checkpoint=config.keep_checkpoint)
        for tracker in trackers:
            tracker.finish(result)
        if "remark" in result:
            warn(result["remark"], RunWarning, stacklevel=2)
    finally:
        federation.engine.close()
    return Result(directory.path, config, metrics, stopped)


def _restore(
    directory: RunDirectory, config: Config, build: Callable[[RunDirectory, Config], Federation]
) -> tuple[Federation, list[dict[str, Any]]]:
    """The roles as they were at the last checkpoint, or new, and the metrics up to there."""
    checkpoint = directory.load_checkpoint(config)
    if checkpoint:
        directory.warn_of_versions()
    try:
        federation = _built(directory, config, build, checkpoint)
    except LostError:  # the S-server may die at any moment, also while it is started; twice is no accident
        federation = _built(directory, config, build, checkpoint)
    with directory.writing():
        metrics, entries = directory.cut_back(checkpoint[1] if checkpoint else None)
    federation.ledger.restore(entries, metrics[-1]["bytes_whole_models"] if metrics else 0)
    return federation, metrics


def _built(
    directory: RunDirectory,
    config: Config,
    build: Callable[[RunDirectory, Config], Federation],
    checkpoint: tuple[Tensors, dict[str, Any]] | None,
) -> Federation:
    federation = build(directory, config)
    try:
        if checkpoint:
            federation.load_checkpoint(*checkpoint)
    except BaseException:
        federation.engine.close()
        raise
    return federation


def _build(directory: RunDirectory, config: Config) -> Federation:
    if config.engine == "flower":
        raise InputError("A run on Flower is an app: make it by 'fsl-sage deploy init DIR' and start it by 'flwr run'.")
    engine = _engine(config)
    setup = make_setup(config)
    _draw_classes(directory, setup)
    return Federation(setup, engine(setup))


def _engine(config: Config) -> Callable[[Setup], Engine]:
    """The engine that the configuration names."""
    if config.engine != "ray":
        return LocalEngine
    try:
        from fsl_sage.engines.ray import RayEngine
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("--engine ray", "ray") from None
    return RayEngine


def _timed_round(federation: Federation, t: int, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    # A round's step 0: its cohort is drawn. Steps 1-5 are `play_round`.
    played = federation.play_round(t, draw_cohort(federation.setup.settings.config, t))
    # Step 6: the merged global model is evaluated on the test set.
    scores = _finite(federation.evaluate(), t)
    seconds = time.perf_counter() - start
    elapsed = seconds + (metrics[-1]["elapsed_seconds"] if metrics else 0.0)
    ledger = federation.ledger
    moved = {
        "bytes_total": ledger.total,
        "bytes_paper": ledger.paper,
        "bytes_whole_models": ledger.whole_models,
    }
    return {"round": t, **scores, **played, **moved, "seconds": seconds, "elapsed_seconds": elapsed}


def _finite(scores: dict[str, float], t: int) -> dict[str, float]:
    """Refuse a model that gives no number: it must not reach a checkpoint."""
    for name, value in scores.items():
        if not np.isfinite(value):
            raise TrainingError(
                f"The {name.replace('_', ' ')} became {value} in round {t}. A lower --optimizer.lr usually helps; "
                "the last checkpoint is kept."
            )
    return scores


def stop_reason(config: Config, metrics: Sequence[dict[str, Any]]) -> str | None:
    """Which stop rule the rounds so far have met, if any."""
    if not metrics:
        return None
    last = metrics[-1]
    if config.target_accuracy is not None and last["test_accuracy"] >= config.target_accuracy:
        return f"target accuracy {config.target_accuracy:.1%} reached"
    if config.budget_gib is not None and last["bytes_paper"] >= config.budget_gib * GIB:
        return f"communication budget of {config.budget_gib:g} GiB used"
    if config.max_seconds is not None and last["elapsed_seconds"] >= config.max_seconds:
        return f"time limit of {config.max_seconds:g} s reached"
    if len(metrics) >= config.rounds:
        return f"all {config.rounds} rounds played"
    return None


def _summary(metrics: Sequence[dict[str, Any]], stopped: str) -> dict[str, Any]:
    best = max(metrics, key=lambda line: line["test_accuracy"])
    last = metrics[-1]
    diverged = {"remark": _diverged(last["test_loss"])} if last["test_loss"] > BEYOND else {}
    return {
        **diverged,
        "stopped": stopped,
        "rounds": len(metrics),
        "best_accuracy": best["test_accuracy"],
        "best_round": best["round"],
        "final_accuracy": last["test_accuracy"],
        "final_loss": last["test_loss"],
        "bytes_total": last["bytes_total"],
        "bytes_paper": last["bytes_paper"],
        "bytes_whole_models": last["bytes_whole_models"],
        "elapsed_seconds": last["elapsed_seconds"],
    }


def _diverged(loss: float) -> str:
    return (
        f"The training diverged: its last test loss is {loss:.3g}, where a model that knows nothing has about the "
        "logarithm of the number of classes. A lower --optimizer.lr usually helps."
    )


def _draw_classes(directory: RunDirectory, setup: Setup) -> None:
    data = setup.settings.task.data  # type: ignore[attr-defined]
    labels, classes = data.train.y.cpu().numpy(), data.classes
    counts = np.stack([np.bincount(labels[share.numpy()], minlength=len(classes)) for share in setup.examples])
    with directory.writing():
        directory.save_classes(counts, classes)
        classes_figure(directory.path / "classes.png", counts, classes)

"""A run: builds the roles from a configuration and plays the rounds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.config import NO_PART_OF_THE_RESULT, Config, option
from fsl_sage.engines.base import Engine, LostError, Setup
from fsl_sage.engines.local import LocalEngine
from fsl_sage.engines.process import prefer_huge_pages
from fsl_sage.errors import InputError, MissingExtra
from fsl_sage.experiment.federation import Federation, draw_cohort
from fsl_sage.experiment.setup import check_config, make_setup
from fsl_sage.models import save_adapters
from fsl_sage.problems.base import Problem
from fsl_sage.problems.make import make_problem
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.records.figures import classes_figure, colour_of, score_figure
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.trackers import TRACKERS, Tracker
from fsl_sage.wire.ledger import GIB

Build = Callable[[RunDirectory, Config, Problem], Federation]
"""Makes the roles of a run."""


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
    """What the run is judged by: a name among the metrics, and a direction."""

    @property
    def best_score(self) -> float:
        """The best headline score of any round."""
        return self.score.best(line[self.score.name] for line in self.metrics)

    @property
    def best_accuracy(self) -> float:
        """The best headline score, by the name that it has for images and texts."""
        return self.best_score

    @property
    def model_file(self) -> Path:
        """The final merged weights, for the ordinary unsplit model."""
        return RunDirectory(self.directory).model_file


def run(config: Config, trackers: Sequence[Tracker] = (), *, problem: Problem | None = None) -> Result:
    """Train from the beginning, in a new run directory.

    Args:
        config: Everything that decides the run.
        trackers: Told of its progress.
        problem: What is learnt, if it is not what `config.data` and `config.model` name. The configuration is recorded
            with the problem's own name; to resume the run, the same problem must be given.
    """
    if problem is not None:
        config = problem.named(config)
    directory = RunDirectory.create(config)
    try:
        return play(directory, config, trackers, problem)
    except InputError:
        directory.abandon()  # so that the corrected command may use the same directory
        raise


def resume(
    path: Path,
    trackers: Sequence[Tracker] = (),
    workers: int | None = None,
    *,
    problem: Problem | None = None,
    **changes: Any,
) -> Result:
    """Resume a run that was interrupted, from its last checkpoint, exactly as if it had never been interrupted.

    Args:
        path: The run's directory.
        trackers: Told of its progress.
        workers: Clients that train side by side; never changes a number.
        problem: The problem that the run was started with, if one was given.
        changes: Other options that decide no number, such as `engine` or `ray_address`.
    """
    directory = RunDirectory(path)
    config = directory.config()
    if directory.finished():
        raise InputError(f"{path} is finished: its result is in {directory.result_file}.")
    decisive = sorted(set(changes) - set(NO_PART_OF_THE_RESULT))
    if decisive:
        raise InputError(f"{', '.join(map(option, decisive))} cannot change when a run goes on: start a new run.")
    if workers is not None:
        changes["workers"] = workers
    if problem is not None and problem.named(config) != config:
        raise InputError(f"{path} is a run on {config.data.name}, not on {problem.name}: give its own problem.")
    return play(directory, replace(config, **changes), trackers, problem)


def play(
    directory: RunDirectory,
    config: Config,
    trackers: Sequence[Tracker],
    problem: Problem | None = None,
    build: Build | None = None,
) -> Result:
    """The run of a directory, from its last checkpoint to the end; `build` makes roles that are not all here."""
    prefer_huge_pages()  # before the data is loaded
    check_config(config)
    build = build or partial(_build, _engine(config))
    # 1. The problem, and the roles: clients and servers; as they were at the last checkpoint, if there is one.
    problem = problem or make_problem(config)
    score = problem.score
    directory.save_score(score)
    federation, metrics = _restore(directory, config, problem, build)
    trackers = [*trackers, *(TRACKERS[name]() for name in config.track)]
    lost = -1
    try:
        for tracker in trackers:
            tracker.start(config, directory.path, metrics)
        # 2. The rounds, until a stop rule is met.
        while (stopped := stop_reason(config, score, metrics)) is None:
            t = len(metrics)
            try:
                metrics.append(_timed_round(federation, t, score, metrics))
                directory.append(metrics[-1], federation.ledger.written_in(t))
                if (t + 1) % config.checkpoint_every == 0:
                    directory.save_checkpoint(config, *federation.checkpoint(t + 1))
            except LostError:
                if t == lost:
                    raise  # twice in the same round is no accident
                lost = t
                federation.engine.close()
                federation, metrics = _restore(directory, config, problem, build)
                continue
            for tracker in trackers:
                tracker.round(metrics[-1])
        # 3. The final model, the figure, the result.
        colour = colour_of(config.algorithm, ALGORITHMS)
        score_figure(directory.figure(score), metrics, score, config.algorithm, colour)
        result = _summary(metrics, score, stopped)
        model = federation.merged()
        save_adapters(directory.adapter, config.model.name, config.lora, model)
        directory.finish(model, result, keep_checkpoint=config.keep_checkpoint)
        for tracker in trackers:
            tracker.finish(result)
    finally:
        federation.engine.close()
    return Result(directory.path, config, metrics, stopped, score)


def _restore(
    directory: RunDirectory, config: Config, problem: Problem, build: Build
) -> tuple[Federation, list[dict[str, Any]]]:
    """The roles as they were at the last checkpoint, or new, and the metrics up to there."""
    checkpoint = directory.load_checkpoint(config)
    federation = build(directory, config, problem)
    first = federation.load_checkpoint(*checkpoint) if checkpoint else 0
    metrics, entries = directory.cut_back(first)
    federation.ledger.restore(entries, metrics[-1]["bytes_whole_models"] if metrics else 0)
    return federation, metrics


def _build(engine: Callable[[Setup], Engine], directory: RunDirectory, config: Config, problem: Problem) -> Federation:
    setup = make_setup(config, problem)
    _draw_classes(directory, setup, problem)
    return Federation(setup, engine(setup))


def _engine(config: Config) -> Callable[[Setup], Engine]:
    """The engine that the configuration names."""
    if config.engine == "flower":
        raise InputError("A run on Flower is an app: make it by 'fsl-sage deploy init DIR' and start it by 'flwr run'.")
    if config.engine != "ray":
        return LocalEngine
    try:
        from fsl_sage.engines.ray import RayEngine
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("--engine ray", "ray") from None
    return RayEngine


def _timed_round(federation: Federation, t: int, score: Score, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    # A round's step 0: its cohort is drawn. Steps 1-5 are `play_round`.
    played = federation.play_round(t, draw_cohort(federation.setup.settings.config, t))
    # Step 6: the merged global model is evaluated on the test set.
    scores = federation.evaluate()
    if score.name not in scores:
        raise InputError(f"The task gives no {score.name}, the headline score, but {', '.join(scores) or 'nothing'}.")
    seconds = time.perf_counter() - start
    elapsed = seconds + (metrics[-1]["elapsed_seconds"] if metrics else 0.0)
    ledger = federation.ledger
    moved = {
        "bytes_total": ledger.total,
        "bytes_paper": ledger.paper,
        "bytes_whole_models": ledger.whole_models,
    }
    return {"round": t, **scores, **played, **moved, "seconds": seconds, "elapsed_seconds": elapsed}


def stop_reason(config: Config, score: Score, metrics: Sequence[dict[str, Any]]) -> str | None:
    """Which stop rule the rounds so far have met, if any."""
    if not metrics:
        return None
    last = metrics[-1]
    if config.target_accuracy is not None and score.reaches(last[score.name], config.target_accuracy):
        return f"target {score.short} {score.text(config.target_accuracy)} reached"
    if config.budget_gib is not None and last["bytes_paper"] >= config.budget_gib * GIB:
        return f"communication budget of {config.budget_gib:g} GiB used"
    if config.max_seconds is not None and last["elapsed_seconds"] >= config.max_seconds:
        return f"time limit of {config.max_seconds:g} s reached"
    if len(metrics) >= config.rounds:
        return f"all {config.rounds} rounds played"
    return None


def _summary(metrics: Sequence[dict[str, Any]], score: Score, stopped: str) -> dict[str, Any]:
    best = score.best_of(metrics)
    last = metrics[-1]
    return {
        "stopped": stopped,
        "rounds": len(metrics),
        "score": score.name,
        "best_score": best[score.name],
        "best_round": best["round"],
        "final_score": last[score.name],
        "final_loss": last.get("test_loss"),
        "bytes_total": last["bytes_total"],
        "bytes_paper": last["bytes_paper"],
        "bytes_whole_models": last["bytes_whole_models"],
        "elapsed_seconds": last["elapsed_seconds"],
    }


def _draw_classes(directory: RunDirectory, setup: Setup, problem: Problem) -> None:
    """Who holds which classes, where there are any."""
    labels = problem.labels()
    if labels is None or not problem.classes:
        return
    numbers, classes = labels.cpu().numpy(), problem.classes
    counts = np.stack([np.bincount(numbers[share.numpy()], minlength=len(classes)) for share in setup.examples])
    directory.save_classes(counts, classes)
    classes_figure(directory.path / "classes.png", counts, classes)

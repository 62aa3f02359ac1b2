"""A run: builds the roles from a configuration and plays the rounds."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from warnings import warn

from fsl_sage.activity import now, told_to
from fsl_sage.algorithms import make_algorithm, resolve
from fsl_sage.config import NO_PART_OF_THE_RESULT, Config, DataConfig, option, require_config
from fsl_sage.engines.base import Engine, LostError, Setup
from fsl_sage.engines.local import LocalEngine
from fsl_sage.engines.process import prefer_huge_pages
from fsl_sage.engines.threads import wait_for_interrupted
from fsl_sage.errors import InputError, MissingExtra, RunWarning, TrainingError, described
from fsl_sage.experiment.checkpoints import Checkpoints
from fsl_sage.experiment.client_disk import say_disk_use
from fsl_sage.experiment.drawings import draw_classes, draw_score
from fsl_sage.experiment.federation import Federation, draw_cohort
from fsl_sage.experiment.probe import Probe
from fsl_sage.experiment.result import Result
from fsl_sage.experiment.round_metrics import finite, footprints_in, row_of, stop_reason, summary
from fsl_sage.experiment.setup import check_config, make_setup
from fsl_sage.models import save_adapters
from fsl_sage.precision import multiplies_bfloat16
from fsl_sage.problems.base import Problem
from fsl_sage.problems.make import make_problem, named
from fsl_sage.problems.score import Score
from fsl_sage.records.activity_file import ActivityFile
from fsl_sage.records.card import model_card
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.trackers import TRACKERS, StopRun, Tracker
from fsl_sage.wire.message import Tensors

LOSSES = 3
"""An S-server that is lost so often in one round, or while it starts, ends the run: that is no accident."""

Build = Callable[[RunDirectory, Config, Problem], Federation]
"""Makes the roles of a run."""


def run(config: Config, callbacks: Sequence[Tracker] = (), *, problem: Problem | None = None) -> Result:
    """Train from the beginning, in a new run directory.

    Args:
        config: Everything that decides the run.
        callbacks: Told when the run starts, after every round, and when it ends.
        problem: What is learnt, if it is not what `config.data` and `config.model` name. The configuration is recorded
            with the problem's own name; to resume the run, the same problem must be given.

    Returns:
        The finished run: its directory, its metrics round by round, and which rule ended it.
    """
    require_config(config, "run")
    if problem is not None and not isinstance(problem, Problem):
        raise InputError(f"problem= is a {type(problem).__name__}: give a fsl_sage.Problem, not what makes one.")
    config = resolve(named(config) if problem is None else problem.named(config))
    directory = RunDirectory.at(config)
    with directory.held():
        directory.begin(config)
        try:
            return play(directory, config, callbacks, problem)
        except InputError:
            directory.abandon()  # so that the corrected command may use the same directory
            raise


def resume(
    path: Path | str,
    callbacks: Sequence[Tracker] = (),
    workers: int | None = None,
    *,
    problem: Problem | None = None,
    **changes: Any,
) -> Result:
    """Resume an interrupted run from its last checkpoint, exactly as if never interrupted.

    Args:
        path: The run's directory.
        callbacks: Told when the run starts, after every round, and when it ends.
        workers: Clients that train side by side; never changes a number.
        problem: The problem that the run was started with, if one was given.
        changes: Other options that change no number, such as `engine` or `ray_address`.

    Returns:
        The finished run, as `run` returns it.
    """
    directory = RunDirectory(path)
    config = resolve(directory.config())
    decisive = sorted(set(changes) - set(NO_PART_OF_THE_RESULT))
    if decisive:
        raise InputError(f"{', '.join(map(option, decisive))} cannot change when a run is resumed: start a new run.")
    if workers is not None:
        changes["workers"] = workers
    if problem is not None and problem.named(config) != config:
        raise InputError(f"{path} is a run on {config.data.name}, not on {problem.name}: give its own problem.")
    if directory.finished():  # before the lock, which an archive of runs may not allow
        raise _is_finished(directory)
    with directory.held(), directory.from_its_folder():
        if directory.finished():  # by another process, just now
            raise _is_finished(directory)
        return play(directory, replace(config, **changes), callbacks, problem)


def _is_finished(directory: RunDirectory) -> InputError:
    return InputError(f"{directory.path} is finished: its result is in {directory.result_file}.")


def play(
    directory: RunDirectory,
    config: Config,
    callbacks: Sequence[Tracker],
    problem: Problem | None = None,
    build: Build | None = None,
) -> Result:
    """Play the run of a directory from its last checkpoint, or from its beginning, to the end.

    Args:
        directory: Where the run is recorded; it is locked until this returns.
        config: Everything that decides the run.
        callbacks: Told when the run starts, after every round, and when it ends.
        problem: What is learnt; None for what the configuration names.
        build: Makes the roles, where they are not all in this process.
    """
    activity = ActivityFile(directory.path)
    callbacks = [*_trackers(callbacks), *(TRACKERS[name]() for name in config.track)]

    def tell(doing: str) -> None:
        for callback in (activity, *callbacks):
            callback.activity(doing)

    with directory.held():
        directory.forget_failure()
        with told_to(tell):
            try:
                return _play(directory, config, callbacks, problem, build)
            except InputError as error:
                if directory.metrics():  # else the run is abandoned
                    directory.save_failure(str(error))
                raise
            except Exception as error:  # the rest is in code of the user's own, and is told as it came
                directory.save_failure(str(error) if isinstance(error, TrainingError) else described(error))
                raise
            finally:
                activity.close()


def _trackers(callbacks: Sequence[Tracker] | Tracker) -> list[Tracker]:
    """The callbacks as a list; a single one may be given without a list."""
    each: list[Tracker] = [callbacks] if isinstance(callbacks, Tracker) else list(callbacks)
    for callback in each:
        if not isinstance(callback, Tracker):
            raise InputError(
                f"callbacks has a {type(callback).__name__}: give objects of a class that derives from "
                "fsl_sage.Tracker."
            )
    return each


def _play(
    directory: RunDirectory,
    config: Config,
    callbacks: Sequence[Tracker],
    given: Problem | None,
    given_build: Build | None,
) -> Result:
    prefer_huge_pages()  # before the data is loaded
    wait_for_interrupted()
    check_config(config)
    directory.check_keep(config.keep)
    if (remark := make_algorithm(config).remark()) is not None:
        warn(remark, RunWarning, stacklevel=3)
    # 1. The problem, and the roles: clients and servers; as they were at the last checkpoint, if there is one.
    now("loading the data")
    build = given_build or partial(_build, _engine(config))
    problem = given or make_problem(config)
    score = problem.score
    with directory.writing():
        directory.set_keep(config.keep)
        directory.save_score(score)
        directory.save_inference(problem.inference())
    federation, metrics = _restore(directory, config, problem, build)
    checkpoints = Checkpoints(config.checkpoint_every)
    losses = Counter[int]()
    ended: str | None = None
    try:
        _start(callbacks, config, directory, metrics)
        # 2. The rounds, until a stop rule is met.
        while True:
            t = len(metrics)
            try:
                if (stopped := ended or stop_reason(config, score, metrics)) is not None:
                    model = federation.merged()
                    if config.keep_checkpoint and checkpoints.rounds != t:
                        _write_checkpoint(directory, federation, config, t, checkpoints)
                    break
                metrics.append(_timed_round(federation, t, score, metrics))
                _record(directory, federation, config, score, metrics, checkpoints)
            except LostError:
                losses[t] += 1
                if losses[t] == LOSSES:
                    raise
                federation.engine.close()
                federation, metrics = _restore(directory, config, problem, build)
                if len(metrics) < t:  # the round after which a callback ended the run is still to come
                    ended = None
                _start(callbacks, config, directory, metrics)
                continue
            ended = _tell(callbacks, metrics[-1])
        # 3. The final model, the figure, the result.
        _conclude(directory, config, problem, callbacks, metrics, model, stopped)
    finally:
        federation.engine.close()
        for callback in callbacks:
            callback.close()
    return Result(directory.path, config, metrics, stopped, score)


def _record(
    directory: RunDirectory,
    federation: Federation,
    config: Config,
    score: Score,
    metrics: Sequence[dict[str, Any]],
    checkpoints: Checkpoints,
) -> None:
    """Write down the last round: its metrics, its bytes and, if it is due, a checkpoint."""
    now("writing the files of the round")
    t = len(metrics) - 1
    with directory.writing():
        directory.append(metrics[t], federation.ledger.written_in(t))
        if config.keep == "best" and score.best_of(metrics)["round"] == t:
            directory.save_best(federation.merged(), t)
    if checkpoints.due(t + 1):
        _write_checkpoint(directory, federation, config, t + 1, checkpoints)


def _write_checkpoint(
    directory: RunDirectory, federation: Federation, config: Config, rounds: int, checkpoints: Checkpoints
) -> None:
    with checkpoints.writing(rounds), directory.writing():
        directory.save_checkpoint(config, *federation.checkpoint(rounds))
        directory.settle_best(rounds)
        federation.engine.settle()


def _conclude(
    directory: RunDirectory,
    config: Config,
    problem: Problem,
    callbacks: Sequence[Tracker],
    metrics: Sequence[dict[str, Any]],
    model: Tensors,
    stopped: str,
) -> None:
    """Write down the final model and the result, and tell the callbacks."""
    score = problem.score
    result = summary(metrics, score, stopped)
    with directory.writing():
        directory.save_model(model)
        directory.save_by_class(metrics[-1], problem.classes)
        save_adapters(directory.adapter, config.model.name, config.lora, model)
        directory.settle_best(len(metrics))
        directory.save_card(model_card(config, score, result, problem.inference()))
        draw_score(directory, config, metrics, score)
        directory.finish(result, keep_checkpoint=config.keep_checkpoint)
    for callback in callbacks:
        callback.finish(result)
    if "remark" in result:
        warn(result["remark"], RunWarning, stacklevel=3)


def _start(
    callbacks: Sequence[Tracker], config: Config, directory: RunDirectory, metrics: list[dict[str, Any]]
) -> None:
    """Tell every callback that the run begins with these rounds; also again, when later ones were lost."""
    for callback in callbacks:
        callback.start(config, directory.path, metrics)


def _tell(callbacks: Sequence[Tracker], metrics: dict[str, Any]) -> str | None:
    """Tell every callback of a round; returns why one of them ends the run, if one does."""
    ended: str | None = None
    for callback in callbacks:
        try:
            callback.round(metrics)
        except StopRun as stop:
            ended = ended or str(stop)
    return ended


def _restore(
    directory: RunDirectory, config: Config, problem: Problem, build: Build
) -> tuple[Federation, list[dict[str, Any]]]:
    """The roles as they were at the last checkpoint, or new, and the metrics up to there."""
    now("building the model")
    checkpoint = directory.load_checkpoint(config)
    if checkpoint:
        directory.warn_of_versions()
        directory.settle_best(checkpoint[1]["rounds"])  # a kill may have come between the checkpoint and this
        directory.check_best()
    for start in range(1, LOSSES + 1):
        try:
            federation = _built(directory, config, problem, build, checkpoint)
            break
        except LostError:  # the S-server may die at any moment, also while it is started
            if start == LOSSES:
                raise
    with directory.writing():
        metrics, entries = directory.cut_back(checkpoint[1] if checkpoint else None)
    federation.ledger.restore(entries, metrics[-1]["bytes_whole_models"] if metrics else 0)
    federation.footprints = footprints_in(metrics)
    return federation, metrics


def _built(
    directory: RunDirectory,
    config: Config,
    problem: Problem,
    build: Build,
    checkpoint: tuple[Tensors, dict[str, Any]] | None,
) -> Federation:
    federation = build(directory, config, problem)
    federation.engine.keep_in(directory.clients)
    try:
        if checkpoint:
            federation.load_checkpoint(*checkpoint)
    except BaseException:
        federation.engine.close()
        raise
    return federation


def _build(engine: Callable[[Setup], Engine], directory: RunDirectory, config: Config, problem: Problem) -> Federation:
    setup = make_setup(config, problem)
    if config.theory is not None:
        Probe(setup)  # refuses what it cannot measure before anything is trained
    if config.parameter_fidelity is not None:
        Probe(setup, "--parameter-fidelity")
    say_disk_use(setup, directory.clients)
    if config.precision == "bf16" and setup.settings.device.type == "cpu" and not multiplies_bfloat16():
        warn(
            "--precision bf16 does not pay here: this CPU has no products of bfloat16 numbers (AVX-512 BF16 or AMX). "
            "float32 is faster and keeps more digits.",
            RunWarning,
            stacklevel=5,
        )
    if config.data.partition != "dirichlet" and config.data.alpha != DataConfig.alpha:
        warn(
            f"--data.alpha {config.data.alpha:g} has no effect: the partition is {config.data.partition}. "
            "--data.partition dirichlet goes by it.",
            RunWarning,
            stacklevel=5,
        )
    draw_classes(directory, config, setup.examples, problem)
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
    config = federation.setup.settings.config
    measured = config.theory is not None and t % config.theory == 0
    before = federation.point() if measured else None
    # A round's step 0: its cohort is drawn. Steps 1-5 are `play_round`.
    played = federation.play_round(t, draw_cohort(config, t))
    # Step 6: the merged global model is evaluated on the test set.
    scores = finite(federation.evaluate(), t)
    if score.name not in scores:
        raise InputError(f"The task gives no {score.name}, the headline score, but {', '.join(scores) or 'nothing'}.")
    if before is not None:
        now("measuring the theory's quantities")
        played["theory"] = Probe(federation.setup).measure(before, federation.point())
    if config.parameter_fidelity is not None and t % config.parameter_fidelity == 0:
        now("comparing the gradients of the client part's weights")
        played |= Probe(federation.setup).parameter_fidelity(federation.point())
    seconds = time.perf_counter() - start
    elapsed = seconds + (metrics[-1]["elapsed_seconds"] if metrics else 0.0)
    ledger = federation.ledger
    moved = {
        "bytes_total": ledger.total,
        "bytes_paper": ledger.paper,
        "bytes_whole_models": ledger.whole_models,
    }
    return row_of(t, scores, {**played, **moved, "seconds": seconds, "elapsed_seconds": elapsed})

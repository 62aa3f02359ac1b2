"""The figures of a run. One that cannot be drawn is a remark: it must not cost the run what it has learnt."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
from torch import Tensor

from fsl_sage.algorithms.looks import colour_of
from fsl_sage.config import Config
from fsl_sage.errors import RunWarning, described, sentence
from fsl_sage.problems.base import Problem
from fsl_sage.problems.score import Score
from fsl_sage.records.run_directory import RunDirectory


def draw_classes(directory: RunDirectory, config: Config, examples: Sequence[Tensor], problem: Problem) -> None:
    """Write down how many examples of each class each client holds, where there are classes.

    Args:
        directory: The run's.
        config: The run's.
        examples: For each client, the numbers of its examples.
        problem: What is learnt.
    """
    labels = problem.labels()
    if labels is None or not problem.classes:
        return
    numbers, classes = labels.cpu().numpy(), problem.classes
    counts = np.stack([np.bincount(numbers[share.numpy()], minlength=len(classes)) for share in examples])
    file = directory.path / "classes.png"

    def draw() -> None:
        from fsl_sage.records.figures import classes_figure  # matplotlib takes a second to import

        classes_figure(file, counts, classes, config)

    with directory.writing():
        directory.save_classes(counts, classes)
        _drawn(file, draw)


def draw_score(directory: RunDirectory, config: Config, metrics: Sequence[dict[str, Any]], score: Score) -> None:
    """Draw the headline score against communication."""
    file = directory.figure(score)

    def draw() -> None:
        from fsl_sage.records.figures import score_figure

        score_figure(file, metrics, score, config, colour_of(config.algorithm))

    with directory.writing():
        _drawn(file, draw)


def _drawn(file: Path, draw: Callable[[], None]) -> None:
    try:
        draw()
    except OSError:  # a full disk, which is told by other words
        raise
    except Exception as error:  # whatever matplotlib makes of names, colours and numbers
        told = sentence(f"{file.name} could not be drawn: {described(error)}")
        warn(f"{told} The run goes on without it; its numbers are in metrics.jsonl.", RunWarning, stacklevel=5)

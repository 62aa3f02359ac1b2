"""The metrics of a run's model on a test set."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsl_sage.alignment.passes import Passes
from fsl_sage.config import Config
from fsl_sage.devices import pick_device
from fsl_sage.engines.process import prepare_device, threads
from fsl_sage.errors import InputError
from fsl_sage.inference.trained import Trained, load_trained
from fsl_sage.precision import dtype_of, with_precision
from fsl_sage.problems.base import Batch, Problem, Task
from fsl_sage.problems.images.sites import load_unseen_images
from fsl_sage.problems.make import make_problem
from fsl_sage.records.run_directory import RunDirectory


def evaluate(
    run: Path | str,
    data: str | None = None,
    *,
    best: bool = False,
    problem: Problem | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """The metrics of a run's model, as a round of the run has them.

    Args:
        run: The run's directory.
        data: A data set as --data.name names it; if not given, the run's own. Its test set is used, or all of a folder
            or an archive that has none. It is normalised as the run's was.
        best: Take the model of the best round instead of the last one's.
        problem: The problem that the run was started with, if one was given.
        told: Called with the number of batches that are done, and of all.

    Returns:
        The metrics by name, as in metrics.jsonl: `test_loss`, the headline score and others.
    """
    trained = load_trained(run, best=best, problem=problem)
    config = trained.config
    with RunDirectory(trained.directory).from_its_folder() if data is None else nullcontext():
        problem = problem or (make_problem(config) if data is None else _other(trained, data))
    device = prepare_device(pick_device(config.device))
    model = with_precision(trained.model, dtype_of(config.precision), device)
    task = problem.make_task(config, device)
    sums: dict[str, Any] = {}
    with threads(config.threads):
        for index in range(task.test_batches()):
            scores = _score(model, task, config, task.test_batch(index))
            sums = {name: sums[name] + value if sums else value for name, value in scores.items()}
            told(index + 1, task.test_batches())
    return task.summarise(sums)


@torch.no_grad()
def _score(model: nn.Module, task: Task, config: Config, batch: Batch) -> dict[str, Any]:
    with Passes(task, task.device, config.precision).autocast():
        output = task.output(_Called(model, batch.inputs), (), batch.target)
    return task.score(output, batch.target)


class _Called(nn.Module):
    """A whole model in the place of what stands behind a cut; its inputs are known."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs

    def forward(self) -> Any:
        """The model's output for its inputs."""
        return self.model(**self._inputs) if isinstance(self._inputs, Mapping) else self.model(self._inputs)


def _other(trained: Trained, data: str) -> Problem:
    """The test images of another set, seen as the run's own."""
    if trained.terms is None:
        raise InputError(f"{trained.directory} is not a run on images: --data is for images alone.")
    config = trained.config
    _, height, width = trained.terms.image
    pictures = data.startswith(("folder:", "datasets:"))  # which are brought to the size of the run's own
    side = height if pictures and height == width else None
    chosen = replace(config.data, name=data, train_images=None, test_images=None, image_size=side)
    return load_unseen_images(replace(config, data=chosen), trained.terms)

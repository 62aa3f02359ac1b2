"""Small models, many clients, beside pfl-research: the seconds of a round there over those of a round here.

    pip install --target build/pfl pfl==0.6.0        # apart: it asks for older packages than the others here
    PYTHONPATH=build/pfl python -m benchmarks.pfl_cnn

The setting is that of pfl's own benchmark on CIFAR-10: 1,000 clients with 50 images each, 50 of them in a round, one
epoch in batches of 10, plain SGD, its CNN with dropout. Images are random, for only time is measured. Each side runs in
this process with one thread, as its users would call it: there FederatedAveraging with a SimulatedBackend, here a run
with a ledger and a directory. Runs take turns; counted are the processor seconds of rounds after each run's first.
There nothing is evaluated in these rounds, here one batch of 10 images is. Here the CNN runs twice: with the plain
layers of `torch.nn` as there, and with this package's, which have the same weights and store maps channels last.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.timing import CONSOLE, Ratio, at_least
from fsl_sage import Config, DataConfig, ModelConfig, OptimizerConfig, Tracker, models, run

CLIENTS, IMAGES, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.1
ROUNDS, REPEATS = 6, 3
TESTED = 10


def cnn(classes: int = 10, layers: Any = nn) -> nn.Sequential:
    """Two convolutions and two dense layers, with dropout; images [N, 3, 32, 32] to logits [N, classes]."""
    return nn.Sequential(
        nn.Sequential(layers.Conv2d(3, 32, 3), nn.ReLU()),
        nn.Sequential(layers.Conv2d(32, 64, 3), nn.ReLU(), layers.MaxPool2d(2), nn.Dropout(0.25)),
        nn.Sequential(nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(128, classes),
    )


def fast_cnn(classes: int = 10) -> nn.Sequential:
    """The same with this package's layers."""
    return cnn(classes, models)


class WithLoss(nn.Module):
    """The same as pfl wants it: with its loss and its metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.model = cnn()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of a batch, in training mode."""
        self.train()
        return nn.functional.cross_entropy(self.model(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Nothing is evaluated."""
        return {}


def theirs(x: Tensor, y: Tensor) -> float:
    """Processor seconds of a round of pfl."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    marks: list[float] = []

    class Watch(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            marks.append(time.process_time())
            return False, Metrics()  # do not stop

    def of(user: int) -> Dataset:
        own = slice(user * IMAGES, (user + 1) * IMAGES)
        return Dataset(raw_data=(x[own], y[own]))

    module = WithLoss()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset(of, get_user_sampler("random", list(range(CLIENTS))))
    FederatedAveraging().run(
        NNAlgorithmParams(ROUNDS, evaluation_frequency=ROUNDS, train_cohort_size=COHORT, val_cohort_size=None),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR),
        callbacks=[Watch()],
        send_metrics_to_platform=False,
    )
    return statistics.median(np.diff(marks))


class Watch(Tracker):
    """Notes the processor time at the end of every round."""

    def start(self, config: Config, directory: Path, done: list[dict[str, Any]]) -> None:
        """The run begins."""
        self.marks: list[float] = []

    def round(self, metrics: dict[str, Any]) -> None:
        """A round has ended."""
        self.marks.append(time.process_time())


def ours(images: Path, factory: Callable[..., nn.Module]) -> float:
    """Processor seconds of a round here, with a model of this factory."""
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch()
        config = Config(
            algorithm="fedavg",
            clients=CLIENTS,
            cohort=COHORT / CLIENTS,
            client_optimizer="reset",
            rounds=ROUNDS,
            batch_size=BATCH,
            workers=1,
            checkpoint_every=ROUNDS,
            data=DataConfig(name=f"npz:{images}", test_fraction=TESTED / (CLIENTS * IMAGES + TESTED), augment=False),
            model=ModelConfig(name=f"benchmarks.pfl_cnn:{factory.__name__}", cut="0"),
            optimizer=OptimizerConfig(name="sgd", lr=LR, momentum=0, weight_decay=0),
            out=Path(folder) / "run",
        )
        run(config, [watch])
        return statistics.median(np.diff(watch.marks))


def main() -> None:
    """Print the ratio."""
    try:
        import pfl  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("pfl is not here: pip install --target build/pfl pfl==0.6.0, then set PYTHONPATH=build/pfl.")
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (CLIENTS * IMAGES + TESTED, 32, 32, 3), dtype=np.uint8)
    y = rng.integers(0, 10, len(x))
    as_floats = torch.from_numpy(x[:-TESTED]).permute(0, 3, 1, 2).contiguous().float() / 255
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.npz"
        np.savez(file, x=x, y=y)
        times = [
            (theirs(as_floats, torch.from_numpy(y[:-TESTED])), ours(file, cnn), ours(file, fast_cnn))
            for _ in range(REPEATS)
        ]
    there, *here = (list(side) for side in zip(*times, strict=True))
    goal = at_least(1.0)
    for layers, seconds in zip(("plain layers", "this package's layers"), here, strict=True):
        ratio = Ratio(there, seconds)
        verdict = "met" if goal.is_met(ratio.median) else "not met"
        CONSOLE.print(f"pfl's round over a round here, its CNN with {layers}: {ratio} (goal: {goal}, {verdict})")


if __name__ == "__main__":
    main()

"""A problem of the user's own whose data lie at the sites: a table, a number for each row, and a model for it."""

import torch
from torch import nn
from torch.nn import functional as F

from fsl_sage import Config, Score, TensorProblem


def absolute(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The error of each row."""
    return (output - y).abs().mean(1)


def table(config: Config) -> TensorProblem:
    """The rows in `config.data.dir`; the same serve for testing."""
    x = torch.load(config.data.dir / "x.pt", weights_only=True)
    pair = (x, x.sum(1, keepdim=True))
    score = Score("test_error", higher_is_better=False)
    return TensorProblem(pair, pair, model, F.mse_loss, absolute, score, cut="0")


def model() -> nn.Module:
    """Four layers."""
    return nn.Sequential(*(nn.Linear(n, 8) for n in (5, 8, 8)), nn.Linear(8, 1))

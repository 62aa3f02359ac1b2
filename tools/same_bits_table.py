"""A small regression from a table, for `make same-bits`: a problem that is named by MODULE:FACTORY."""

import torch
from torch import nn

from fsl_sage import Score, TensorProblem


def prices() -> TensorProblem:
    """Sixty rows of four numbers, and their sum to be learnt."""
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    return TensorProblem(
        (x[:60], y[:60]),
        (x[60:], y[60:]),
        _model,
        loss=nn.functional.huber_loss,
        metric=lambda output, y: (output - y).abs().mean(1),
        score=Score("test_error", higher_is_better=False),
        cut="0",
    )


def _model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(inputs, 8), nn.Tanh()) for inputs in (4, 8, 8)]
    return nn.Sequential(*blocks, nn.Linear(8, 1))

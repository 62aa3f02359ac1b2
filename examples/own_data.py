"""Data, a loss and a score of your own: python examples/own_data.py"""

import torch
from torch import nn

from fsl_sage import Config, OptimizerConfig, Score, TensorProblem, run


def make_model():
    """Four blocks of a small regression network."""
    layers = [nn.Sequential(nn.Linear(n, 32), nn.ReLU()) for n in (8, 32, 32)]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def distance(output, target):
    """How far each prediction is from the truth: [B]."""
    return (output - target).abs().squeeze(1)


x = torch.randn(1200, 8, generator=torch.Generator().manual_seed(0))
y = (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)  # what is to be learnt
problem = TensorProblem(
    train=(x[:1000], y[:1000]),
    test=(x[1000:], y[1000:]),
    model=make_model,
    loss=nn.functional.mse_loss,
    metric=distance,
    score=Score("test_distance", higher_is_better=False),
    cut="0",  # the first block is at the client
)

if __name__ == "__main__":
    config = Config(clients=5, rounds=10, batch_size=20, optimizer=OptimizerConfig(lr=0.01))
    result = run(config, problem=problem)
    print(f"distance {result.metrics[0]['test_distance']:.2f} -> {result.best_score:.2f}")

"""The model of Flower's baseline niid_bench, after Li et al., 2022: two convolutions with 6 and 16 channels."""

from torch import nn


def cnn(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Images [N, channels, 32, 32] to logits [N, classes]."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, classes),
    )

"""A small convolutional network for quick trials."""

from collections import OrderedDict

from torch import Tensor, nn

from fsl_sage.models.conv import Conv2d
from fsl_sage.models.layout import AdaptiveAvgPool2d, MaxPool2d
from fsl_sage.models.norm import BatchNorm2d


class SmallCNN(nn.Module):
    """Three convolutions, each halving the map, and a linear layer on their mean over the map.

    Images [N, channels, H, W], from 8x8 upwards, to logits [N, classes].
    """

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.block1 = _block(channels, 16)
        self.block2 = _block(16, 32)
        self.block3 = _block(32, 64)
        self.head = nn.Sequential(
            OrderedDict(avgpool=AdaptiveAvgPool2d((1, 1)), flatten=nn.Flatten(), fc=nn.Linear(64, classes))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block3(self.block2(self.block1(x))))


def _block(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=Conv2d(channels_in, channels, kernel_size=3, padding=1, bias=False),
            bn=BatchNorm2d(channels),
            maxpool=MaxPool2d(2),
            relu=nn.ReLU(),
        )
    )

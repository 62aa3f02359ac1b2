"""A small convolutional network for quick trials."""

from collections import OrderedDict

from torch import Tensor, nn

from fsl_sage.models.conv import Conv2d
from fsl_sage.models.layout import AdaptiveAvgPool2d
from fsl_sage.models.norm import BatchNorm2d


class SmallCNN(nn.Module):
    """Three convolutions, each with stride 2, and a linear layer on their mean over the map.

    Images [N, channels, H, W], from 8x8 upwards, to logits [N, classes].
    """

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.block1 = _block(channels, 32)
        self.block2 = _block(32, 64)
        self.block3 = _block(64, 128)
        self.head = nn.Sequential(
            OrderedDict(avgpool=AdaptiveAvgPool2d((1, 1)), flatten=nn.Flatten(), fc=nn.Linear(128, classes))
        )

    def forward(self, x: Tensor) -> Tensor:
        """From images [N, channels, H, W] to logits [N, classes]."""
        return self.head(self.block3(self.block2(self.block1(x))))


def _block(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=Conv2d(channels_in, channels, kernel_size=3, stride=2, padding=1, bias=False),
            bn=BatchNorm2d(channels),
            relu=nn.ReLU(),
        )
    )

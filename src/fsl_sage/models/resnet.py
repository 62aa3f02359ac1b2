"""ResNet-18 with the ImageNet stem, as the paper uses it; parameter names are torchvision's."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsl_sage.models.conv import Conv2d
from fsl_sage.models.layout import AdaptiveAvgPool2d, MaxPool2d
from fsl_sage.models.norm import BatchNorm2d


@dataclass(frozen=True)
class _Layers:
    conv: type[nn.Conv2d]
    norm: type[nn.BatchNorm2d]
    max_pool: type[nn.MaxPool2d]
    average_pool: type[nn.AdaptiveAvgPool2d]


_FAST = _Layers(Conv2d, BatchNorm2d, MaxPool2d, AdaptiveAvgPool2d)
_PLAIN = _Layers(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d)


class ResNet18(nn.Module):
    """The unsplit model: images [N, channels, H, W] to logits [N, classes].

    With `fast`, the layers of this package: the same function and state_dict, less time on a CPU. Without it, the plain
    ones of `torch.nn`.
    """

    def __init__(self, classes: int = 10, channels: int = 3, *, fast: bool = True) -> None:
        super().__init__()
        layers = _FAST if fast else _PLAIN
        self.conv1 = layers.conv(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = layers.norm(64)
        self.maxpool = layers.max_pool(kernel_size=3, stride=2, padding=1)
        self.relu = nn.ReLU()
        self.layer1 = _stage(layers, 64, 64, stride=1)
        self.layer2 = _stage(layers, 64, 128, stride=2)
        self.layer3 = _stage(layers, 128, 256, stride=2)
        self.layer4 = _stage(layers, 256, 512, stride=2)
        self.avgpool = layers.average_pool((1, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """From images [N, channels, H, W] to logits [N, classes]."""
        x = self.bn1(self.conv1(x))
        x = self.relu(self.maxpool(x))  # the same as the pool of the ReLU, on a quarter of the values
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class BasicBlock(nn.Module):
    """relu(F(x) + x), F two 3x3 convolutions; x by a 1x1 convolution where F changes its shape."""

    def __init__(self, layers: _Layers, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = layers.conv(channels_in, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = layers.norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = layers.conv(channels, channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = layers.norm(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            shortcut = layers.conv(channels_in, channels, kernel_size=1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, layers.norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """From [N, channels in, H, W] to [N, channels, H / stride, W / stride]."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def _stage(layers: _Layers, channels_in: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(layers, channels_in, channels, stride), BasicBlock(layers, channels, channels, 1))

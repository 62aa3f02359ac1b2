"""A decoder: from the activations of an image back to the image."""

from torch import Tensor, nn
from torch.nn import functional as F

from fsl_sage.models.conv import Conv2d

WIDTH = 16
"""Channels at the resolution of the image."""


class Decoder(nn.Module):
    """Two convolutions with an enlargement between them: [B, channels, h, w] to [B, image channels, H, W]."""

    def __init__(self, channels: int, image_channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size
        self.conv1 = Conv2d(channels, WIDTH, 3, padding=1)
        self.conv2 = Conv2d(WIDTH, image_channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """The nearest pixel is repeated, whatever the two sizes are."""
        return self.conv2(F.interpolate(self.conv1(z).relu(), size=self.size))

import pytest
import torch
from torch import nn

from fsl_sage.alignment.dataset import Upload
from fsl_sage.alignment.passes import Passes
from fsl_sage.problems.images.classification import Classification
from fsl_sage.problems.images.images import ImageData, Images


@pytest.fixture
def passes():
    images = Images(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 2, 0]))
    data = ImageData("four", images, images, ("a", "b", "c"), (0.0,), (1.0,))
    return Passes(Classification(data, torch.device("cpu")), torch.device("cpu"))


def head(seed, dropout=0.0):
    """Convolution, BatchNorm, pooling, linear: smooth, so that finite differences make sense."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(54, 3)
    )


def upload(size, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(size, 4, 3, 3, generator=generator, dtype=dtype)
    return Upload((z,), {"labels": torch.randint(3, (size,), generator=generator)})

import pytest
import torch

from fsl_sage.errors import InputError
from fsl_sage.problems.images.images import ImageData, Images, Sizes


def images(count: int = 4, channels: int = 3, side: int = 8, labels: int = 2) -> Images:
    return Images(torch.zeros(count, channels, side, side, dtype=torch.uint8), torch.arange(count) % labels)


def data(train: Images, test: Images, channels: int = 3) -> ImageData:
    return ImageData("a set", train, test, ("cat", "dog"), (0.5,) * channels, (0.2,) * channels)


def test_subset_keeps_the_order_asked_for():
    whole = Images(torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1), torch.arange(5))
    part = whole.subset([3, 0])
    assert part.x.flatten().tolist() == [3, 0]
    assert part.y.tolist() == [3, 0]
    assert len(part) == 2


def test_to_moves_images_and_labels():
    moved = images().to("meta")
    assert moved.x.device.type == moved.y.device.type == "meta"


def test_sizes_are_those_of_the_tensors():
    assert data(images(4), images(2)).sizes == Sizes(4, 2, 2, (3, 8, 8))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int64)),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_wrong_tensors_are_refused(x, y):
    with pytest.raises(InputError):
        Images(x, y)


@pytest.mark.parametrize(
    ("train", "test", "channels", "said"),
    [
        (images(side=8), images(side=9), 3, "test images"),
        (images(), images(), 1, "3 channels"),
        (images(labels=3), images(), 3, "labels 0 to 1"),
        (images(), images(0), 3, "no test images"),
    ],
)
def test_sets_that_do_not_fit_together_are_refused(train, test, channels, said):
    with pytest.raises(InputError, match=said):
        data(train, test, channels)

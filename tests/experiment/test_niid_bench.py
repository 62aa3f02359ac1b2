"""What experiments/niid_bench.py has of Flower's baseline: inputs, crops and the partition by class."""

import numpy as np
import torch
from experiments.niid_bench import PADDING, ZeroToOne, cnn, dealt_by_class, reflected_crops

from fsl_sage.problems.images.augment import normalise
from fsl_sage.problems.images.cifar import CIFAR10_MEAN, CIFAR10_STD


def test_its_model_sees_images_from_0_to_1():
    x = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(ZeroToOne()(normalise(x, CIFAR10_MEAN, CIFAR10_STD)), x / 255)
    assert sum(weight.numel() for weight in cnn().parameters()) == 62006


def test_crops_are_of_reflected_images():
    x = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    crops = reflected_crops(x, torch.Generator().manual_seed(0))
    places = range(2 * PADDING + 1)
    for image, crop in zip(x.numpy(), crops.numpy(), strict=True):
        larger = np.pad(image, ((0, 0), (PADDING, PADDING), (PADDING, PADDING)), mode="reflect")
        windows = [larger[:, top : top + 32, left : left + 32] for top in places for left in places]
        assert any(np.array_equal(crop, window) or np.array_equal(crop, window[:, :, ::-1]) for window in windows)


def test_each_class_is_dealt_out_and_who_has_enough_gets_no_more():
    labels = np.repeat(np.arange(10), 50)
    clients = dealt_by_class(labels, 5, 0.5, np.random.default_rng(0))
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(500))
    sizes = [len(client) for client in clients]
    assert min(sizes) < 100 < max(sizes)
    for client in clients:  # before its last class a client had less than an equal share of all images
        last = labels[client].max()
        assert (labels[client] < last).sum() < 100

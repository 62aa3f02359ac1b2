"""Makes cifar10_mini.npz in src/fsl_sage/problems/images, the images of the package, from the whole of CIFAR-10.

    python experiments/make_cifar10_mini.py [DATA_DIRECTORY]

Takes the first 500 training and the first 100 test images of each class in the official order.
"""

import sys
from pathlib import Path

import torch

from fsl_sage.problems.images.images import Images
from fsl_sage.problems.images.mini import MINI_PATH, read_mini, write_mini
from fsl_sage.problems.images.sources import load_images


def first_of_each_class(images: Images, count: int) -> Images:
    chosen = [torch.nonzero(images.y == label).flatten()[:count] for label in images.y.unique()]
    return images.subset(torch.cat(chosen).sort().values)


def main() -> None:
    data = load_images("cifar10", Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    train, test = first_of_each_class(data.train, 500), first_of_each_class(data.test, 100)
    write_mini(train, test)
    again = read_mini()
    assert torch.equal(again.train.x, train.x)
    assert torch.equal(again.train.y, train.y)
    assert torch.equal(again.test.x, test.x)
    assert torch.equal(again.test.y, test.y)
    print(f"{MINI_PATH}: {len(train)} + {len(test)} images, {MINI_PATH.stat().st_size:,} bytes, read back exactly")


if __name__ == "__main__":
    main()

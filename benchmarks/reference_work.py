"""A round of each algorithm against the same algorithm as it is usually written: python -m benchmarks.reference_work

The usual way: plain layers of `torch.nn` on contiguous tensors, images transformed one at a time as a DataLoader does,
torch's default Adam, one `backward` for everything that is behind the cut, and clients one after the other, each
through its whole epoch. It keeps no ledger and measures no fidelity; this package does both. No double backward is in
either side, since alignment is measured on its own.

One thread, processor time, both sides in turn. The ratio is theirs over ours: how many times as fast a round is here.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.rounds import ALGORITHMS, Bare, Ours, boundary, config_for
from benchmarks.timing import CONSOLE, at_least, compare_cpu, note
from fsl_sage.config import Config, DataConfig
from fsl_sage.engines.base import Setup
from fsl_sage.engines.process import prepare_process
from fsl_sage.experiment.setup import make_setup
from fsl_sage.models import ResNet18

GOALS = {"fsl-sage": 2.5, "cse-fsl": 2.5, "splitfed-ms": 2.1, "splitfed-ss": 2.1, "fedavg": 2.1}
"""At batches of 256 images."""
GOAL_OF_SMALL_BATCHES = 2.0
MOST_UPLOADED = 1000
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))


def plain_resnet18(classes: int, channels: int) -> nn.Module:
    """ResNet-18 of plain layers, for --model.name MODULE:FACTORY."""
    return ResNet18(classes, channels, fast=False)


def plain(config: Config) -> Config:
    """The same run with plain layers."""
    model = replace(config.model, name=f"{__name__}:{plain_resnet18.__name__}", cut="layer2", auxiliary="blocks:1")
    return replace(config, model=model)


class Pictures(Dataset[tuple[Tensor, int]]):
    """A client's pictures, one after the other, as torchvision with the usual transforms has them."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Keep images, uint8 [N, 3, 32, 32], and their labels."""
        self.images, self.labels = images.permute(0, 2, 3, 1).numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One picture, cropped and flipped at random, and normalised."""
        picture = ImageOps.expand(Image.fromarray(self.images[index]), border=4)
        top, left = torch.randint(0, 9, (2,)).tolist()
        picture = picture.crop((left, top, left + 32, top + 32))
        if torch.rand(()) < 0.5:
            picture = ImageOps.mirror(picture)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float() / 255
        return (pixels - MEAN) / STD, self.labels[index]


class UsualWay(Bare):
    """An algorithm as it is usually written: every batch from a `DataLoader`, every loss read, every gradient taken."""

    make_optimizer = staticmethod(lambda module: torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=1e-4))

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.setup = replace(setup, modules={}, initial={})  # such code has no weights that nobody trains
        for mine in self.parts:
            for module in mine.values():
                module.train().requires_grad_(True)
        images = self.task.data.train
        pictures = (Pictures(images.x[examples], images.y[examples]) for examples in setup.examples)
        self.loaders = [DataLoader(mine, self.config.batch_size, shuffle=True) for mine in pictures]
        self.uploaded = [torch.empty(0) for _ in self.parts]

    def average(self, parts: tuple[str, ...]) -> None:
        """The mean of all clients' weights, in a model of its own first."""
        for part in parts:
            models = [mine[part] for mine in self.parts]
            mean = copy.deepcopy(models[0])
            weights = mean.state_dict()
            for name in weights:
                weights[name] = weights[name] / len(models)
                for model in models[1:]:
                    weights[name] += model.state_dict()[name] / len(models)
            mean.load_state_dict(weights)
            for model in models:
                model.load_state_dict(mean.state_dict())

    def learn(self, z: Tensor, labels: Tensor) -> None:
        """A step of the server."""
        self.optimizers[0]["server"].zero_grad()
        loss = nn.functional.cross_entropy(self.parts[0]["server"](z), labels)
        loss.item()
        loss.backward()
        self.optimizers[0]["server"].step()

    def auxiliary_round(self, train: bool) -> None:
        """Clients train against their auxiliaries; the server learns from every upload as it comes.

        `backward` computes the gradients of the auxiliary too, which FSL-SAGE doesn't use; in CSE-FSL the server's
        computes the upload's, which is not sent back.
        """
        for client, mine in enumerate(self.parts):
            optimizers = [self.optimizers[client][part] for part in (("client", "auxiliary") if train else ("client",))]
            for k, (x, labels) in enumerate(self.loaders[client]):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                z = boundary(mine["client"](x))
                leaf, upload = z.detach().clone().requires_grad_(), z.detach().clone().requires_grad_(train)
                loss = nn.functional.cross_entropy(mine["auxiliary"](leaf), labels)
                loss.item()
                loss.backward()
                z.backward(leaf.grad)
                for optimizer in optimizers:
                    optimizer.step()
                if k % self.setup.algorithm.options.upload_every == 0:
                    self.learn(upload, labels)
                    if not train:  # what the auxiliary will be aligned with
                        self.uploaded[client] = torch.cat((self.uploaded[client], upload))[-MOST_UPLOADED:]
        self.average(("client", "auxiliary") if train else ("client",))

    def in_step(self, server_of: Callable[[int], int]) -> None:
        """Clients that wait for the server's gradients; one after the other, as such code has it."""
        for client, mine in enumerate(self.parts):
            own, server = self.optimizers[client]["client"], self.parts[server_of(client)]["server"]
            other = self.optimizers[server_of(client)]["server"]
            for x, labels in self.loaders[client]:
                own.zero_grad()
                other.zero_grad()
                z = boundary(mine["client"](x))
                leaf = z.detach().clone().requires_grad_()
                loss = nn.functional.cross_entropy(server(leaf), labels)
                loss.item()
                loss.backward()
                z.backward(leaf.grad)
                other.step()
                own.step()

    def fedavg(self) -> None:
        """Clients that train the whole model."""
        for client, mine in enumerate(self.parts):
            for x, labels in self.loaders[client]:
                for part in ("client", "server"):
                    self.optimizers[client][part].zero_grad()
                loss = nn.functional.cross_entropy(mine["server"](boundary(mine["client"](x))), labels)
                loss.item()
                loss.backward()
                for part in ("client", "server"):
                    self.optimizers[client][part].step()
        self.average(("client", "server"))


def settings(algorithm: str, batch_size: int) -> Config:
    """A client with five steps, the first of which is uploaded where not all are; two take twice as long."""
    config = config_for(algorithm, "resnet18", batch_size, clients=1)
    return replace(config, data=DataConfig(train_images=5 * batch_size, test_images=100))


def main(repeats: int = 2) -> None:
    """Print how many times as fast a round of each algorithm is."""
    threads = torch.get_num_threads()
    prepare_process(threads=1)
    CONSOLE.print("\n[bold]A round as it is usually written, over this package's[/] (processor time, one thread)")
    for batch_size in (256, 64):
        for algorithm in ALGORITHMS:
            config = settings(algorithm, batch_size)
            ours, usual = Ours(make_setup(config)), UsualWay(make_setup(plain(config)))
            goal = GOALS[algorithm] if batch_size == 256 else GOAL_OF_SMALL_BATCHES
            ratio = compare_cpu(usual.play, ours.play, repeats)
            CONSOLE.print(f"  batch {batch_size:>3} {algorithm:<12} {ratio}; goal {goal}")
            what = f"a round of {algorithm} as it is usually written over ours, batch {batch_size}"
            note(what, ratio.median, at_least(goal))
            ours.close()
    torch.set_num_threads(threads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    main(parser.parse_args().repeats)

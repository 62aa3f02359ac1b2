"""A round of each algorithm against the same algorithm as it is usually written: python -m benchmarks.reference_work

The usual way: plain layers of `torch.nn` on contiguous tensors, images transformed one at a time as a DataLoader does,
torch's default Adam, one `backward` for everything that is behind the cut, and clients one after the other, each
through its whole epoch. It keeps no ledger and measures no fidelity; this package does both. No double backward is in
either side, since alignment is measured on its own.

One thread, processor time, both sides in turn. The ratio is theirs over ours: how many times as fast a round is here.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.rounds import ALGORITHMS, Bare, Ours, boundary, config_for
from benchmarks.timing import CONSOLE, at_least, compare_cpu, note
from fsl_sage.config import Config, DataConfig
from fsl_sage.engines.process import prepare_process
from fsl_sage.experiment.setup import make_setup
from fsl_sage.models import ResNet18

GOALS = {"fsl-sage": 2.5, "cse-fsl": 2.5, "splitfed-ms": 2.1, "splitfed-ss": 2.1, "fedavg": 2.1}
"""At batches of 256 images."""
GOAL_OF_SMALL_BATCHES = 2.0
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))


def plain_resnet18(classes: int, channels: int) -> nn.Module:
    """ResNet-18 of plain layers, for --model.name MODULE:FACTORY."""
    return ResNet18(classes, channels, fast=False)


def plain(config: Config) -> Config:
    """The same run with plain layers."""
    model = replace(config.model, name=f"{__name__}:{plain_resnet18.__name__}", cut="layer2", auxiliary="blocks:1")
    return replace(config, model=model)


class UsualWay(Bare):
    """An algorithm as it is usually written."""

    make_optimizer = staticmethod(lambda module: torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=1e-4))

    def batches(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images that are transformed one at a time."""
        examples, images = self.setup.examples[client], self.task.data.train
        for indices in examples[torch.randperm(len(examples))].split(self.config.batch_size):
            yield torch.stack([transformed(images.x[index]) for index in indices]), images.y[indices]

    def learn(self, z: Tensor, labels: Tensor) -> None:
        """A step of the server."""
        self.optimizers[0]["server"].zero_grad()
        nn.functional.cross_entropy(self.parts[0]["server"](z), labels).backward()
        self.optimizers[0]["server"].step()

    def auxiliary_round(self, train: bool) -> None:
        """Clients train against their auxiliaries; the server learns from every upload as it comes."""
        for client, mine in enumerate(self.parts):
            for k, (x, labels) in enumerate(self.batches(client)):
                z = boundary(mine["client"](x))
                if k % self.setup.algorithm.options.upload_every == 0:
                    self.learn(z.detach(), labels)
                nn.functional.cross_entropy(mine["auxiliary"](z), labels).backward()
                self.step(client, *(("client", "auxiliary") if train else ("client",)))
                mine["auxiliary"].zero_grad()
        self.average(("client", "auxiliary") if train else ("client",))

    def in_step(self, server_of) -> None:
        """Clients that wait for the server's gradients; one after the other, as such code has it."""
        for client, mine in enumerate(self.parts):
            owner = server_of(client)
            for x, labels in self.batches(client):
                z = boundary(mine["client"](x))
                leaf = z.detach().requires_grad_()
                nn.functional.cross_entropy(self.parts[owner]["server"](leaf), labels).backward()
                self.step(owner, "server")
                z.backward(leaf.grad)
                self.step(client, "client")

    def fedavg(self) -> None:
        """Clients that train the whole model."""
        for client, mine in enumerate(self.parts):
            for x, labels in self.batches(client):
                nn.functional.cross_entropy(mine["server"](boundary(mine["client"](x))), labels).backward()
                self.step(client, "client", "server")
        self.average(("client", "server"))


def transformed(image: Tensor) -> Tensor:
    """One image, uint8 [3, 32, 32], cropped and flipped at random, and normalised."""
    top, left = torch.randint(0, 9, (2,)).tolist()
    image = nn.functional.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
    if torch.rand(()) < 0.5:
        image = image.flip(2)
    return (image.float() / 255 - MEAN) / STD


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

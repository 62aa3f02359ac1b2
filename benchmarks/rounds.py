"""A round of each algorithm against a bare PyTorch loop that does the same tensor work.

The bare loop has no roles, messages, ledger, replicas or generators: modules, optimizers and two loops. Both sides use
one worker and one torch thread, the same modules and the same batches; evaluation is on neither side.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from benchmarks.timing import CONSOLE, Goal, at_least, compare, compare_cpu, note
from fsl_sage.alignment.fidelity import CLIENTS, SAMPLES
from fsl_sage.config import Config, DataConfig, GivenOptions, ModelConfig
from fsl_sage.engines.base import Setup
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment import Federation
from fsl_sage.experiment.setup import make_setup
from fsl_sage.models.norm import batch_statistics
from fsl_sage.problems.batches import batch_indices
from fsl_sage.seeding import generator

ALGORITHMS = ("fsl-sage", "cse-fsl", "splitfed-ms", "splitfed-ss", "fedavg")


def config_for(algorithm: str, model: str, batch_size: int = 64, clients: int = 4) -> Config:
    """Clients with eight steps each; no alignment, which is measured on its own."""
    return Config(
        algorithm=algorithm,
        clients=clients,
        rounds=1000,
        batch_size=batch_size,
        options=GivenOptions({"align_every": 1000}, of_several=True),
        workers=1,
        device="cpu",
        data=DataConfig(train_images=clients * 8 * batch_size, test_images=100),
        model=ModelConfig(name=model),
    )


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)


class Bare:
    """The same work without the system."""

    make_optimizer = staticmethod(adam)

    def __init__(self, setup: Setup) -> None:
        self.setup, self.task, self.config = setup, setup.settings.task, setup.settings.config
        clients = range(len(setup.examples))
        self.t = 1
        used = {*setup.algorithm.holds, "server"}
        own = {part: module for part, module in setup.modules.items() if part in used}
        has_copies = self.config.algorithm in ("splitfed-ms", "fedavg")
        for_all = {} if has_copies else {"server": copy.deepcopy(own.pop("server"))}
        self.parts = [copy.deepcopy(own) | for_all for _ in clients]
        for mine in self.parts:
            for part, module in mine.items():
                module.requires_grad_(part in setup.algorithm.averaged or part == "server")
        self.optimizers = [
            {p: self.make_optimizer(m) for p, m in mine.items() if has_gradients(m)} for mine in self.parts
        ]

    def batches(self, client: int):
        examples = self.setup.examples[client]
        order = batch_indices(len(examples), self.config.batch_size, generator(0, "order", client, self.t, 0))
        for step, indices in enumerate(order):
            yield self.task.training_batch(examples[indices], generator(0, "augment", client, self.t, step))

    def cut_gradient(self, head: nn.Module, z: torch.Tensor, target: dict, train: bool) -> torch.Tensor:
        leaf = z.detach().requires_grad_()
        if train:
            head.train()
            self.task.loss(head(leaf), target).backward()
            return leaf.grad
        with batch_statistics(head):
            return torch.autograd.grad(self.task.loss(head(leaf), target), leaf)[0]

    def step(self, client: int, *parts: str) -> None:
        for part in parts:
            self.optimizers[client][part].step()
            self.optimizers[client][part].zero_grad()

    def learn(self, z: torch.Tensor, target: dict) -> None:
        server = self.parts[0]["server"].train()
        self.task.loss(server(z), target).backward()
        self.step(0, "server")

    def average(self, parts: tuple[str, ...]) -> None:
        for part in parts:
            states = [mine[part].state_dict() for mine in self.parts]
            for name, first in states[0].items():
                if first.is_floating_point():
                    mean = torch.stack([state[name] for state in states]).mean(0)
                    for state in states:
                        state[name].copy_(mean)

    def play(self) -> None:
        getattr(self, self.config.algorithm.replace("-", "_"))()
        self.t += 1

    def auxiliary_round(self, train: bool) -> None:
        uploads = []
        for client, mine in enumerate(self.parts):
            for k, batch in enumerate(self.batches(client)):
                z = boundary(mine["client"].train()(batch.inputs))
                if k % self.setup.algorithm.options.upload_every == 0:
                    uploads.append((k, client, z.detach(), batch.target))
                z.backward(self.cut_gradient(mine["auxiliary"], z, batch.target, train))
                self.step(client, *(("client", "auxiliary") if train else ("client",)))
        for _, _, z, target in sorted(uploads, key=lambda upload: upload[:2]):
            self.learn(z, target)
        newest = {client: (z, target) for _, client, z, target in uploads}
        for client, (z, target) in list(newest.items())[:CLIENTS]:  # fidelity
            some = {name: tensor[-SAMPLES:] for name, tensor in target.items()}
            for part, owner in (("auxiliary", client), ("server", 0)):
                self.cut_gradient(self.parts[owner][part].requires_grad_(False), z[-SAMPLES:], some, False)
        self.parts[0]["server"].requires_grad_(True)
        for mine in self.parts:
            mine["auxiliary"].requires_grad_(train)
        self.average(("client", "auxiliary") if train else ("client",))

    def fsl_sage(self) -> None:
        self.auxiliary_round(train=False)

    def cse_fsl(self) -> None:
        self.auxiliary_round(train=True)

    def in_step(self, server_of) -> None:
        for batches in zip(*(list(self.batches(client)) for client in range(len(self.parts))), strict=True):
            for client, batch in enumerate(batches):
                z = boundary(self.parts[client]["client"].train()(batch.inputs))
                owner = server_of(client)
                z.backward(self.cut_gradient(self.parts[owner]["server"], z, batch.target, True))
                self.step(owner, "server")
                self.step(client, "client")

    def splitfed_ss(self) -> None:
        self.in_step(lambda client: 0)
        self.average(("client",))

    def splitfed_ms(self) -> None:
        self.in_step(lambda client: client)
        self.average(("client", "server"))

    def fedavg(self) -> None:
        for client, mine in enumerate(self.parts):
            for batch in self.batches(client):
                z = boundary(mine["client"].train()(batch.inputs))
                z.backward(self.cut_gradient(mine["server"], z, batch.target, True))
                self.step(client, "client", "server")
        self.average(("client", "server"))


def boundary(output) -> torch.Tensor:
    """The one boundary tensor of these models."""
    (z,) = getattr(output, "tensors", (output,))
    return z


def has_gradients(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


class Ours:
    """Rounds of a federation, from round 1 on: round 0 would align."""

    def __init__(self, setup: Setup) -> None:
        self.federation = Federation(setup, LocalEngine(setup))
        self.t = 1

    def play(self) -> None:
        clients = self.federation.setup.settings.config.clients
        self.federation.play_round(self.t, list(range(clients)))
        self.t += 1

    def close(self) -> None:
        self.federation.engine.close()


def main(repeats: int = 3, models: Sequence[str] = ("resnet18",)) -> None:
    """A round of each algorithm against the bare loop."""
    torch.set_num_threads(1)
    CONSOLE.print("\n[bold]A round against a bare PyTorch loop[/] (processor time; at most 1.10 for resnet18)")
    for model in models:
        for algorithm in ALGORITHMS:
            setup = make_setup(config_for(algorithm, model, clients=2))
            ours, bare = Ours(setup), Bare(setup)
            ratio = compare_cpu(ours.play, bare.play, repeats)
            CONSOLE.print(f"  {model:<10} {algorithm:<12} {ratio}")
            goal = Goal(1.1) if model == "resnet18" else None
            note(f"a round of {algorithm} over a bare loop, {model}", ratio.median, goal)
            ours.close()


def fidelity(repeats: int = 1) -> None:
    """What measuring fidelity costs: its time over that of a whole round at ten clients."""
    torch.set_num_threads(1)
    CONSOLE.print("\n[bold]Measuring fidelity over a round[/] (time over time; at most 0.02 for resnet18)")
    for algorithm in ("fsl-sage", "cse-fsl"):
        config = config_for(algorithm, "resnet18", clients=10)
        ours = Ours(make_setup(replace(config, data=DataConfig(train_images=5000, test_images=100))))
        ours.play()
        share = compare(ours.federation.engine.server.fidelity, ours.play, repeats, warm=True)
        CONSOLE.print(f"  resnet18   {algorithm:<12} {share.median:.3f} (median of {repeats})")
        note(f"measuring fidelity over a round of {algorithm}", share.median, Goal(0.02))
        ours.close()


def two_workers(repeats: int = 2) -> None:
    """Two workers over one, for algorithms whose clients don't wait."""
    CONSOLE.print("\n[bold]One worker over two[/] (time over time; at least 1.7 on two cores; the bits are the same)")
    for algorithm in ("fsl-sage", "cse-fsl", "fedavg"):
        config = config_for(algorithm, "resnet18")
        one, two = (Ours(make_setup(replace(config, workers=workers))) for workers in (1, 2))
        ratio = compare(one.play, two.play, repeats)
        CONSOLE.print(f"  resnet18   {algorithm:<12} {ratio}")
        note(f"one worker over two, {algorithm}", ratio.median, at_least(1.7))
        one.close()
        two.close()


if __name__ == "__main__":
    main(models=("resnet18", "small-cnn"))  # goals are for ResNet-18, so `make bench` leaves the small one out
    fidelity()
    two_workers()

"""What one poisoned client of ten does to FedAvg, by each rule of averaging: `python -m benchmarks.poisoning`.

Client 0 multiplies its trained weights before it sends them, or trains on flipped labels (class y becomes C - 1 - y).
The data are `cifar10-mini`, divided iid, the model is the small CNN; every run starts from the same weights and takes
the same batches.
"""

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fsl_sage import Algorithm, run
from fsl_sage.algorithms import LocalRound
from fsl_sage.config import AveragingConfig, Config, ModelConfig
from fsl_sage.errors import TrainingError
from fsl_sage.problems.base import Batch
from fsl_sage.roles.averaging import RULES
from fsl_sage.roles.protocols import ClientRole

ATTACKER = 0
CLASSES = 10
ATTACKS: dict[str, dict[str, object]] = {
    "none": {},
    "weights x 1e6": {"factor": 1e6},
    "weights x 10": {"factor": 10.0},
    "flipped labels": {"flips": True},
}


@dataclass(frozen=True)
class PoisonedOptions:
    """What the one client does."""

    factor: float = 1.0
    """By which it multiplies its weights."""
    flips: bool = False
    """Whether it trains on flipped labels."""


class Poisoned(Algorithm):
    """FedAvg with one poisoned client."""

    Options = PoisonedOptions
    options: PoisonedOptions
    uses = ()
    averaged = ("client", "server")
    holds = ("client", "server")
    has_s_server = False

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """The steps of FedAvg."""
        for batch in self._batches(client, t):
            z = client.forward(batch)
            client.backward(z, client.server_gradient(z, batch.target))
            client.step()
        if client.id == ATTACKER and self.options.factor != 1:
            with torch.no_grad():
                for part in self.averaged:
                    for weight in client.parameters(part).values():
                        weight.mul_(self.options.factor)
        yield from ()

    def _batches(self, client: ClientRole, t: int) -> Iterator[Batch]:
        for batch in client.batches(t):
            if client.id == ATTACKER and self.options.flips:
                labels = batch.target["labels"]
                batch = replace(batch, target={**batch.target, "labels": CLASSES - 1 - labels})
            yield batch


def final_accuracy(rule: str, attack: str, rounds: int, out: Path) -> str:
    """The test accuracy after the last round in per cent, or why there is none."""
    config = Config(
        algorithm="benchmarks.poisoning:Poisoned",
        clients=10,
        rounds=rounds,
        device="cpu",
        workers=1,
        out=out / f"{rule} {attack}",
        model=ModelConfig(name="small-cnn"),
        averaging=AveragingConfig(rule=rule),  # type: ignore[arg-type]
        options=ATTACKS[attack],
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it diverged is in the table
            return f"{100 * run(config).metrics[-1]['test_accuracy']:.1f}"
    except TrainingError as error:
        return f"stopped: {error}"


def main() -> None:
    """Print the table, as it stands in docs/reliability.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"| client {ATTACKER} | {' | '.join(RULES)} |\n|{'---|' * (1 + len(RULES))}")
    with tempfile.TemporaryDirectory() as folder:
        for attack in ATTACKS:
            cells = [final_accuracy(rule, attack, rounds, Path(folder)) for rule in RULES]
            print(f"| {attack} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""A pretrained language model at three sites on one machine, none of which could train all of it.

The processes of each site may take so much memory that the client's part of SmolLM2-135M fits and the whole model does
not. One site has the files of its part, the others get it from the server. FSL-SAGE fine-tunes it on prompts and
completions, and ends in the bits of the local engine. Then FedAvg is tried, whose client is the whole model.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from fsl_sage.algorithms import make_algorithm, resolve
from fsl_sage.config import AlignmentConfig, Config, DataConfig, LoRAConfig, ModelConfig, OptimizerConfig
from fsl_sage.deploy.app import agree, write_app, write_sites
from fsl_sage.deploy.demo import compare, demo_directory, follow, listen
from fsl_sage.deploy.processes import LoopbackFederation
from fsl_sage.deploy.server_app import RUN_FILE
from fsl_sage.errors import TrainingError
from fsl_sage.experiment import run
from fsl_sage.models.language import SMOLLM2
from fsl_sage.problems.sources import fetch
from fsl_sage.problems.texts.one_side import export_side
from fsl_sage.problems.texts.problem import TextProblem
from fsl_sage.problems.texts.texts import TextSizes
from fsl_sage.reading import read_json

CLIENTS = 3


@dataclass(frozen=True)
class Scale:
    """What is fine-tuned, and how much memory a site's process may take."""

    model: Path
    memory: int
    """Bytes of RLIMIT_DATA."""
    train: int = 96
    test: int = 24
    rounds: int = 2
    batch_size: int = 4


def language_demo(
    console: Console,
    keep: Path | None = None,
    scale: Scale | None = None,
    federated: Callable[[Path], LoopbackFederation] = LoopbackFederation,
) -> None:
    """Start a federation, train, compare, try FedAvg, clean up.

    Args:
        console: Where it says what it does.
        keep: Where the files stay; if not given, they go.
        scale: What is fine-tuned; if not given, SmolLM2-135M, which is fetched.
        federated: Makes the federation, in a directory.
    """
    scale = scale or Scale(fetch(SMOLLM2), memory=MEMORY)
    with demo_directory(keep) as directory, federated(directory / "federation") as federation:
        config = _config(directory, scale)
        console.print("An app for three sites, and the texts of each in a file of its own", style="bold")
        agreement, shares = agree(config, None)
        write_app(directory / "app", config, agreement)
        sites = write_sites(directory / "sites", shares, agreement)
        files = _files_of_the_client(config, directory / "client-files")
        allowed = f"{scale.memory / 1e6:,.0f} MB"
        console.print(f"A SuperLink with TLS, and three SuperNodes of at most {allowed} a process", style="bold")
        federation.start_superlink()
        federation.register(range(CLIENTS))
        for client, site in enumerate(sites):
            # The first site has the files of its part and its tokenizer; the others have a tokenizer.
            has: dict[str, Any] = {"model": files} if client == 0 else {"tokenizer": files}
            federation.start_node(client, site, state=_state(directory, client), memory=scale.memory, **has)
        console.print("FSL-SAGE", style="bold")
        follow(federation, directory, console)
        console.print("The same run in this process", style="bold")
        local = run(replace(config, out=directory / "local"))
        compare(directory / "run", local.directory)
        first, last, score = local.metrics[0], local.metrics[-1], local.score
        if not last["test_loss"] < first["test_loss"]:
            raise TrainingError("The federation did not learn.")
        console.print(
            "Weights, ledger and metrics of the federation are those of the local engine, bit for bit: test loss "
            f"{first['test_loss']:.3f} after the first round, {last['test_loss']:.3f} after the last, {score.title} "
            f"{score.text(last[score.name])}."
        )
        _say_peaks(console, directory)
        console.print("FedAvg, whose client is the whole model", style="bold")
        _try_fedavg(federation, directory, console, config, agreement.examples[0])
    if keep is not None:
        console.print(f"The files are in {keep}.", soft_wrap=True)


MEMORY = 800_000_000
"""Bytes that a process of a site may take in the demo: FSL-SAGE's client of SmolLM2-135M fits, FedAvg's does not."""


def _config(directory: Path, scale: Scale) -> Config:
    texts = _write_texts(directory / "texts", scale)
    return resolve(
        Config(
            algorithm="fsl-sage",
            clients=CLIENTS,
            rounds=scale.rounds,
            batch_size=scale.batch_size,
            workers=1,
            options={"upload_every": 4, "align_every": 1},
            device="cpu",
            data=DataConfig(name=f"jsonl:{texts}", sequence_length=64),
            model=ModelConfig(name=f"hf:{scale.model}", auxiliary="blocks:1"),
            lora=LoRAConfig(rank=4, dropout=0.0, auxiliary="adapters"),
            # A site can hold one block as its auxiliary, which tells little: its clients take small steps.
            optimizer=OptimizerConfig("adamw", lr=2e-4, server_lr=1e-3, weight_decay=0.0),
            alignment=AlignmentConfig(samples=8, steps=2, batch_size=4),
        )
    )


def _write_texts(directory: Path, scale: Scale) -> Path:
    """Orders in a restaurant and how a waiter repeats them: prompts and completions."""
    dishes = ("soup", "pasta", "rice", "salad", "fish", "curry", "pie", "stew")
    drinks = ("water", "tea", "coffee", "juice")
    tables = range(1, 9)
    orders = [*product(dishes, drinks, tables)]
    random.Random(0).shuffle(orders)
    directory.mkdir(parents=True, exist_ok=True)
    for file, chosen in (("train", orders[: scale.train]), ("test", orders[-scale.test :])):
        rows = (
            {
                "prompt": f"Order: table {table}; dish {dish}; drink {drink}.\nWaiter:",
                "completion": f" One {dish} and a {drink} for table number {table}, with pleasure!",
            }
            for dish, drink, table in chosen
        )
        (directory / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def _files_of_the_client(config: Config, directory: Path) -> Path:
    problem = TextProblem(None, TextSizes(1, 1, config.data.sequence_length))
    export_side(config, problem, make_algorithm(config).holds, directory)
    return directory


def _state(directory: Path, client: int) -> Path:
    return directory / "state" / f"site-{client}"


def _say_peaks(console: Console, directory: Path) -> None:
    """Print the peak memory of each process, as the kernel counts it."""
    about = read_json(directory / "run" / RUN_FILE)
    for client in range(CLIENTS):
        result = read_json(_state(directory, client) / about["run"] / f"client-{client}" / "result.json")
        console.print(f"  client {client}: its processes took at most {result['peak_memory_bytes'] / 1e6:,.0f} MB")
    console.print(f"  servers: {about['server_peak_memory_bytes'] / 1e6:,.0f} MB")


def _try_fedavg(
    federation: LoopbackFederation, directory: Path, console: Console, config: Config, examples: int
) -> None:
    """Run one site as a client of FedAvg under the same limit: it must fail, and give the reason."""
    alone = resolve(replace(config, algorithm="fedavg", clients=1, rounds=1, options=None))
    agreement, _ = agree(alone, (examples,))
    write_app(directory / "fedavg-app", alone, agreement)
    said = listen(federation, directory, console, "fedavg-app", "fedavg-run", must_fail=True)
    if not any("the memory of its process does not suffice" in line for line in said):
        raise TrainingError(f"FedAvg's client was expected not to fit:\n{''.join(said[-30:])}")
    console.print("FedAvg's client does not fit where FSL-SAGE's has trained.")

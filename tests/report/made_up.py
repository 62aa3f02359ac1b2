"""Run directories with made-up numbers, in the form that a run writes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fsl_sage.algorithms import resolve
from fsl_sage.config import Config, all_options, from_dict, from_file
from fsl_sage.records.files import as_csv
from fsl_sage.records.run_directory import LEDGER_HEADER, RunDirectory
from fsl_sage.wire.ledger import BEFORE, Entry

# (bytes a round of one client, accuracy at the end, how fast)
ALGORITHMS = {
    "fsl-sage": (14_000_000, 0.60, 5.0),
    "lazy-fsl-sage": (13_500_000, 0.59, 5.5),
    "cse-fsl": (31_000_000, 0.58, 4.5),
    "splitfed-ms": (87_000_000, 0.62, 6.0),
    "splitfed-ss": (87_000_000, 0.57, 6.0),
    "fedavg": (90_000_000, 0.55, 8.0),
}
HARM = {"iid": 0.0, "dirichlet": 0.2}


def made_up_config(algorithm: str, seed: int = 1, **values: Any) -> Config:
    until = {"align_until": 4} if algorithm == "lazy-fsl-sage" else {}
    config = from_dict({"algorithm": algorithm, "seed": seed, "rounds": 12, **until, **values})
    return resolve(from_file(config, "made up", of_several=True))


def write_run(path: Path, config: Config, *, finished: bool = True, accuracies: list[float] | None = None) -> Path:
    """A run directory without a model; `accuracies` in the place of the made-up ones."""
    directory = RunDirectory.create(replace(config, out=path))
    interval = all_options(config.options).get("align_every", 5)
    clients, rng = config.clients, np.random.default_rng(config.seed)
    each, top, pace = ALGORITHMS[config.algorithm]
    if config.data.partition == "dirichlet":
        top -= 0.1 / (config.data.alpha + 0.5)
    entries = [Entry(BEFORE, client, "down", "first download", 11_000_000) for client in range(clients)]
    lines, total, elapsed = [], 11_000_000 * clients, 0.0
    for t in range(len(accuracies) if accuracies else config.rounds):
        aligned = config.algorithm.endswith("fsl-sage") and t % interval == 0
        for client in range(clients):
            entries += [
                Entry(t, client, "up", "activations", each // 2),
                Entry(t, client, "down", "client model", each // 2),
            ]
            if aligned or config.algorithm == "cse-fsl":
                entries.append(Entry(t, client, "down", "auxiliary", 8_419_408))
        total += sum(entry.bytes for entry in entries if entry.round == t)
        seconds = 4.0 + 3 * aligned + rng.uniform(0, 0.3)
        elapsed += seconds
        accuracy = top * (1 - np.exp(-(t + 1) / pace)) + rng.normal(0, 0.01) if accuracies is None else accuracies[t]
        cosine = 0.3 + 0.4 * np.exp(-(t % interval) / 3) if "fsl" in config.algorithm else None
        lines.append(
            {
                "round": t,
                "test_accuracy": accuracy,
                "test_loss": 2.3 * (1 - accuracy),
                "aligned": aligned,
                "bytes_total": total,
                "bytes_paper": total - 11_000_000 * clients,
                "seconds": seconds,
                "elapsed_seconds": elapsed,
                "fidelity_cosine": cosine,
                "fidelity_nmse": None if cosine is None else 1 - cosine**2,
                "fidelity_cosine_seen": 0.85 if aligned else None,
                "fidelity_nmse_seen": 0.3 if aligned else None,
            }
        )
    directory.ledger_file.write_text(LEDGER_HEADER + as_csv(entries))
    directory.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shares = rng.dirichlet([config.data.alpha if config.data.partition == "dirichlet" else 1e4] * 10, clients)
    directory.save_classes((shares * 1000).astype(int), [f"class {label}" for label in range(10)])
    if finished:
        directory.result_file.write_text(json.dumps({"stopped": f"all {config.rounds} rounds played"}))
    return path


def write_grid(folder: Path, seeds: int = 2, partitions: tuple[Any, ...] = ("iid", 1.0, 0.1)) -> Path:
    """All algorithms in several partitions."""
    for algorithm in ALGORITHMS:
        for seed in range(1, seeds + 1):
            for alpha in partitions:
                data = {"partition": "iid"} if alpha == "iid" else {"partition": "dirichlet", "alpha": alpha}
                write_run(
                    folder / f"{algorithm}_{alpha}_{seed}",
                    made_up_config(algorithm, seed, data=data, clients=10, align_every=5),
                )
    return folder

"""A federation of three sites on one machine: TLS, authenticated nodes, and a check against the local engine."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from fsl_sage.config import Config, DataConfig, ModelConfig
from fsl_sage.deploy.app import agree, write_app, write_sites
from fsl_sage.deploy.processes import NAME, LoopbackFederation
from fsl_sage.errors import TrainingError
from fsl_sage.experiment import run
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory

CONFIG = Config(
    algorithm="fsl-sage",
    clients=3,
    rounds=3,
    batch_size=32,
    options={"upload_every": 2, "align_every": 1},
    device="cpu",
    data=DataConfig(name="cifar10-mini", partition="dirichlet", alpha=1.0, train_images=900, test_images=500),
    model=ModelConfig(name="small-cnn"),
)


def demo(console: Console, keep: Path | None = None) -> None:
    """Start a federation, train, compare with the local engine, clean up. `keep`: a directory whose files stay."""
    with demo_directory(keep) as directory, LoopbackFederation(directory / "federation") as federation:
        console.print("An app for three sites, and the images of each in an archive of its own", style="bold")
        agreement, shares = agree(CONFIG, None)
        write_app(directory / "app", CONFIG, agreement)
        sites = write_sites(directory / "sites", shares, agreement)
        console.print("A SuperLink with TLS, under a CA of its own, that knows the keys of three nodes", style="bold")
        federation.start_superlink()
        federation.register(range(CONFIG.clients))
        console.print("Three SuperNodes, and the run", style="bold")
        for client, site in enumerate(sites):
            federation.start_node(client, site)
        follow(federation, directory, console)
        console.print("The same run in this process", style="bold")
        local = run(replace(CONFIG, out=directory / "local"))
        compare(directory / "run", local.directory)
        last, score = local.metrics[-1], local.score
        console.print(
            f"Weights, ledger and metrics of the federation are those of the local engine, bit for bit: "
            f"{score.title} {score.text(last[score.name])}, {last['bytes_total']:,} bytes moved."
        )
    if keep is not None:
        console.print(f"The files are in {keep}.", soft_wrap=True)


def follow(federation: LoopbackFederation, directory: Path, console: Console) -> None:
    """Call `flwr run` and print the server's log of the run."""
    said = listen(federation, directory, console, "app", "run")
    if not RunDirectory(directory / "run").finished():
        raise TrainingError(f"The run failed:\n{''.join(said[-30:])}")


def listen(
    federation: LoopbackFederation, directory: Path, console: Console, app: str, run: str, *, must_fail: bool = False
) -> list[str]:
    """Call `flwr run` and print the server's log of the run; returns its lines.

    Of a run that must fail the log is printed up to the traceback by which Flower ends it.
    """
    command = ["flwr", "run", str(directory / app), NAME, "--stream"]
    command += ["--run-config", f'run-directory="{directory / run}"']
    said = []
    with subprocess.Popen(
        command, env=federation.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if must_fail and any(each.startswith("Traceback") for each in said):
                continue
            if not re.match(r"(\x1b\[\d+m)?(INFO|DEBUG|WARNING|ERROR)", line) and line.strip():
                console.print(f"  {line.rstrip()}", highlight=False, markup=False, soft_wrap=True)
    return said


def compare(federation: Path, local: Path) -> None:
    """Raise a TrainingError if two runs differ, except in times and remarks about nodes."""
    a, b = RunDirectory(federation), RunDirectory(local)
    for mine, other in zip(a.metrics(), b.metrics(), strict=True):
        differing = [name for name in other if "seconds" not in name and mine[name] != other[name]]
        if differing:
            raise TrainingError(f"Round {mine['round']} differs from the local engine's in {', '.join(differing)}.")
    if a.ledger_file.read_bytes() != b.ledger_file.read_bytes():
        raise TrainingError("The ledger differs from the local engine's.")
    (first, _), (second, _) = load_tensors(a.model_file), load_tensors(b.model_file)
    if first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
        raise TrainingError("The final weights differ from the local engine's.")


@contextmanager
def demo_directory(keep: Path | None) -> Iterator[Path]:
    """A directory for the files of a demo: the one that is given, or a temporary one."""
    directory = keep or Path(tempfile.mkdtemp(prefix="fsl-sage-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield directory.resolve()
    finally:
        if keep is None:
            shutil.rmtree(directory, ignore_errors=True)

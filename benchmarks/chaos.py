"""kill -9 at random moments, again and again, and every file compared: python -m benchmarks.chaos --kills 20

For each place where a process can die, a run is started, killed at a moment drawn at random between its start and its
usual end, and resumed as a user would. Then its model, ledger, metrics and classes are compared, byte by byte and
times excepted, with those of a run that was never killed. `--only local ray-driver` plays some of the places.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_OPTIONS = """
    --model.name small-cnn --data.train-images 150 --data.test-images 100 --clients 3 --batch-size 16 --rounds 6
    --align-every 2 --alignment.steps 3 --cohort 0.67 --device cpu --workers 2
"""
RUN = _OPTIONS.split()
GRID = [*RUN, "--algorithms", "fsl-sage", "fedavg", "--seeds", "1", "--jobs", "2"]
TIMES = ("seconds", "elapsed_seconds", "failures", "rejected")
PATIENCE = 600.0
"""Seconds after which a process that should end counts as hanging."""

HITS: list[int] = []
"""The processes that were alive when they were killed: a kill that comes too late, or too early, proves nothing."""

Trial = Callable[[Path, Path, random.Random], str]
"""Given the run that was never killed, a fresh directory and a source of randomness: what went wrong, or nothing."""


FILES = ("model.safetensors", "ledger.csv", "classes.csv")
ON_FLOWER = FILES[:2]
"""Which classes a site holds, its server does not know."""


def differences(one: Path, other: Path, names: tuple[str, ...] = FILES) -> list[str]:
    """The files in which two finished runs differ, times excepted."""
    differ = [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]
    differ += [name for name in ("metrics.jsonl", "result.json") if _values(one / name) != _values(other / name)]
    left = [path.name for path in other.iterdir() if path.name.endswith(".part") or path.name == ".lock"]
    return differ + [f"{name} is left" for name in left]


def _values(file: Path) -> list[dict]:
    lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def fsl_sage(*arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """The command in a process of its own; what it says goes into a file."""
    command = [sys.executable, "-m", "fsl_sage", *map(str, arguments)]
    with open(log, "ab") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)


def finish(out: Path, log: Path, *arguments: object) -> str:
    """Go on with a run to its end; what went wrong, or nothing."""
    again = arguments or (("resume", out) if (out / "config.json").exists() else ())
    if not again:
        return ""
    code = fsl_sage(*again, log=log).wait(PATIENCE)
    said = log.read_text(errors="replace")
    return f"exit code {code}: {said[-200:]}" if code or "Traceback" in said else ""


def descendants(of: int) -> Iterator[tuple[int, str]]:
    """The processes that a process has started, and those that they have, each with its command."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        parents[int(path.name)] = (int(fields[1]), command)
    found = {of}
    while more := {id for id, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return ((id, parents[id][1]) for id in found - {of})


def kill_within(seconds: float, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """Kill -9 at a random moment; whether it came before the end."""
    try:
        process.wait(rng.uniform(0, seconds))
        return False
    except subprocess.TimeoutExpired:
        kill(process.pid)
        process.wait()
        return True


def kill(process: int) -> None:
    """Kill by -9, and remember it if there was something to kill."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
        HITS.append(process)


def begun(out: Path) -> bool:
    """Whether there is a run to go on with."""
    return (out / "config.json").exists()


# The places


def kill_the_run(*options: str) -> tuple[list[str], Callable[[float], Trial]]:
    """The process that a user has started, with any engine."""

    def made(usual: float) -> Trial:
        def trial(whole: Path, fresh: Path, rng: random.Random) -> str:
            out, log = fresh / "run", fresh / "log"
            while not kill_within(usual, fsl_sage("run", *RUN, *options, "--out", out, log=log), rng) or not begun(out):
                shutil.rmtree(out, ignore_errors=True)  # it came too late, or before there was anything to go on with
                HITS.clear()
            for _ in range(rng.randrange(2)):  # sometimes it is killed while it goes on, too
                if not (out / "result.json").exists():
                    kill_within(usual, fsl_sage("resume", out, log=log), rng)
            wrong = "" if (out / "result.json").exists() else finish(out, log)
            return wrong or ", ".join(differences(whole, out))

        return trial

    return [*RUN, *options], made


def kill_an_actor(name: str) -> tuple[list[str], Callable[[float], Trial]]:
    """One of Ray's actors; the run must go on by itself."""

    def made(usual: float) -> Trial:
        def trial(whole: Path, fresh: Path, rng: random.Random) -> str:
            out, log = fresh / "run", fresh / "log"
            process = fsl_sage("run", *RUN, "--engine", "ray", "--out", out, log=log)
            while not (actors := [id for id, said in descendants(process.pid) if said.startswith(f"ray::{name}")]):
                if process.poll() is not None:
                    return f"it ended early: {log.read_text(errors='replace')[-200:]}"
                time.sleep(0.1)
            time.sleep(rng.uniform(0, usual / 2))
            kill(rng.choice(actors))  # the run may be over
            code = process.wait(PATIENCE)
            if code:
                said = " ".join(log.read_text(errors="replace").partition("fsl-sage: ")[2].split())[:400]
                again = finish(out, log) or ", ".join(differences(whole, out)) or "the same bits"
                return f"it did not go on by itself, exit code {code}: {said}; resumed: {again}"
            return ", ".join(differences(whole, out))

        return trial

    return [*RUN, "--engine", "ray"], made


def kill_a_comparison() -> tuple[list[str], Callable[[float], Trial]]:
    """The command that runs a grid; the same command goes on."""

    def made(usual: float) -> Trial:
        def trial(whole: Path, fresh: Path, rng: random.Random) -> str:
            out, log = fresh / "grid", fresh / "log"
            kill_within(usual, fsl_sage("compare", *GRID, "--out", out, log=log), rng)
            wrong = finish(out, log, "compare", *GRID, "--out", out)
            names = sorted(file.parent.name for file in whole.glob("*/result.json"))
            found = [f"{name}: {file}" for name in names if not wrong for file in differences(whole / name, out / name)]
            return wrong or ", ".join(found)

        return trial

    return ["compare"], made


def kill_a_server() -> tuple[list[str], Callable[[float], Trial]]:
    """The process of Flower's ServerApp; the same `flwr run` goes on."""
    return ["flower"], lambda usual: lambda whole, fresh, rng: _on_flower(whole, fresh, rng, usual, site=False)


def kill_a_site() -> tuple[list[str], Callable[[float], Trial]]:
    """A SuperNode, which is started again: its client misses rounds and is named, and the run comes to its end."""
    return ["flower"], lambda usual: lambda whole, fresh, rng: _on_flower(whole, fresh, rng, usual, site=True)


def _on_flower(whole: Path, fresh: Path, rng: random.Random, usual: float, *, site: bool) -> str:
    from fsl_sage.deploy.demo import CONFIG
    from fsl_sage.deploy.processes import LoopbackFederation

    with LoopbackFederation(fresh / "federation") as federation:
        sites = _flower_sites(fresh)
        federation.start_superlink()
        federation.register(range(CONFIG.clients))
        for client, data in enumerate(sites):
            federation.start_node(client, data)
        running = _flwr_run(federation, fresh)
        time.sleep(rng.uniform(0, usual))
        if site:
            client = rng.randrange(CONFIG.clients)
            HITS.append(federation._running[f"node-{client}"].pid)
            federation.stop(f"node-{client}", signal.SIGKILL)
            federation.start_node(client, sites[client])
        else:
            for id, said in descendants(federation._running["superlink"].pid):
                if "flwr-serverapp" in said:
                    kill(id)
        running.wait(PATIENCE)
        for _ in range(3):
            if not (fresh / "run" / "result.json").exists():
                _flwr_run(federation, fresh).wait(PATIENCE)
    if not (fresh / "run" / "result.json").exists():
        return f"it did not come to its end: {(fresh / 'log').read_text(errors='replace')[-300:]}"
    missing = any(line["missing"] for line in _values(fresh / "run" / "metrics.jsonl"))
    return "" if site and missing else ", ".join(differences(whole, fresh / "run", ON_FLOWER))


def _flower_sites(fresh: Path) -> list[Path]:
    from fsl_sage.deploy.app import agree, write_app, write_sites
    from fsl_sage.deploy.demo import CONFIG

    agreement, shares = agree(CONFIG, None)
    write_app(fresh / "app", CONFIG, agreement)
    return write_sites(fresh / "sites", shares, agreement)


def _flwr_run(federation, fresh: Path) -> subprocess.Popen[bytes]:
    from fsl_sage.deploy.processes import NAME

    command = ["flwr", "run", str(fresh / "app"), NAME, "--stream"]
    command += ["--run-config", f'run-directory="{fresh / "run"}" timeout=120.0']
    with open(fresh / "log", "ab") as log:
        return subprocess.Popen(command, env=federation.environment, stdout=log, stderr=log)


PLACES: dict[str, Callable[[], tuple[list[str], Callable[[float], Trial]]]] = {
    "local": kill_the_run,
    "compare": kill_a_comparison,
    "ray-driver": lambda: kill_the_run("--engine", "ray"),
    "ray-worker": lambda: kill_an_actor("WorkerActor"),
    "ray-server": lambda: kill_an_actor("ServerActor"),
    "flower-server": kill_a_server,
    "flower-site": kill_a_site,
}


def reference(how: list[str], folder: Path) -> float:
    """Play the run that is never killed; how long it takes."""
    start = time.monotonic()
    if how == ["flower"]:
        from dataclasses import replace

        from fsl_sage.deploy.demo import CONFIG
        from fsl_sage.experiment import run

        run(replace(CONFIG, out=folder))
        return 60.0  # a real federation takes that long for these rounds
    arguments = ["compare", *GRID] if how == ["compare"] else ["run", *how]
    code = fsl_sage(*arguments, "--out", folder, log=folder.with_name(folder.name + ".log")).wait(PATIENCE)
    if code:
        raise SystemExit(f"the run that is never killed ended with {code}")
    return time.monotonic() - start


def play(place: str, kills: int, seed: int) -> int:
    """Print how the trials of a place went; the number of those that went wrong."""
    with tempfile.TemporaryDirectory(prefix="fsl-sage-chaos-") as directory:
        how, made = PLACES[place]()
        whole = Path(directory) / "whole"
        trial, wrong, hit = made(reference(how, whole)), 0, 0
        for number in range(kills):
            fresh = Path(directory) / str(number)
            fresh.mkdir()
            HITS.clear()
            said = trial(whole, fresh, random.Random(f"{seed} {place} {number}"))
            wrong, hit = wrong + bool(said), hit + bool(HITS)
            print(f"  {place} {number + 1}/{kills}: {len(HITS)} killed, {said or 'the same bits'}", flush=True)
    print(f"{place}: {kills - wrong} of {kills} gave the same bits; in {hit} of them a kill hit", flush=True)
    return wrong


def main() -> None:
    """Exit code 1 if any trial went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="trials for each place")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=PLACES, default=list(PLACES))
    arguments = parser.parse_args()
    sys.exit(bool(sum(play(place, arguments.kills, arguments.seed) for place in arguments.only)))


if __name__ == "__main__":
    main()

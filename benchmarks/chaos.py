"""kill -9 at random moments, again and again, and every file compared: python -m benchmarks.chaos --kills 20

For each place where a process can die, runs are started, killed at moments drawn at random, and resumed as a user
would, to be killed again. Then model, ledger, metrics and classes are compared, byte by byte and times excepted, with
those of a run that was never killed. A moment is drawn by the number of rounds that are over, from none to all, and by
a part of a round's time, so that kills fall everywhere however busy the machine is. A kill that came too late does not
count, nor one before there was anything to go on with. `--only local ray-driver` plays some of the places.

The commands are forked from a process that has everything imported, so that a trial costs what a run costs, and not
what torch costs: they are processes of their own, and as real as any.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path

_OPTIONS = """
    --model.name small-cnn --data.train-images 150 --data.test-images 100 --clients 3 --batch-size 16 --rounds 6
    --cohort 0.67 --device cpu --workers 2
"""
ANY = _OPTIONS.split()
"""What any algorithm knows."""
RUN = [*ANY, "--align-every", "2", "--alignment.steps", "3"]
GRID = [*RUN, "--algorithms", "fsl-sage", "fedavg", "--seeds", "1", "--jobs", "2"]
TIMES = ("seconds", "elapsed_seconds", "failures", "rejected")
PATIENCE = 900.0
"""Seconds after which a process that should end counts as hanging."""

HITS: list[int] = []
"""The processes that were alive when they were killed, of one trial."""

Trial = Callable[[Path, random.Random, int], str]
"""Given a fresh directory, a source of randomness and how often to kill: what went wrong, or nothing."""

Place = Callable[[Path], AbstractContextManager[Trial]]
"""Given a directory, plays what is never killed there, and then gives the trial of this place."""

FILES = ("model.safetensors", "ledger.csv")
OPTIONAL = ("classes.csv", "best.safetensors", "test_by_class.csv")


def differences(one: Path, other: Path) -> list[str]:
    """The files in which two finished runs differ, times excepted."""
    names = [*FILES, *(name for name in OPTIONAL if (one / name).exists() or (other / name).exists())]
    differ = [name for name in names if _bytes(one / name) != _bytes(other / name)]
    differ += [name for name in ("metrics.jsonl", "result.json") if _values(one / name) != _values(other / name)]
    left = [path.name for path in other.iterdir() if path.name.endswith(".part") or path.name == ".lock"]
    return differ + [f"{name} is left" for name in left]


def _bytes(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b"not there"


def _values(file: Path) -> list[dict]:
    lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


class Command:
    """`fsl-sage …` in a process of its own; what it says goes into a file."""

    def __init__(self, *arguments: object, log: Path) -> None:
        self.log = log
        self._process = _forks().Process(target=_obey, args=([str(argument) for argument in arguments], log))
        self._process.start()
        self.id = self._process.pid

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it ends within these seconds."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def wrong(self) -> str:
        """Wait for its end; what went wrong, or nothing."""
        if not self.ended(PATIENCE):
            self._process.kill()
            return f"it hangs: {self.said()[-400:]}"
        code = self._process.exitcode
        return f"exit code {code}: {self.said()[-400:]}" if code or "Traceback" in self.said() else ""

    def said(self) -> str:
        """All that was said so far, in one line."""
        return " ".join(self.log.read_text(errors="replace").split())


def _forks() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fsl_sage.cli.commands", "fsl_sage.records.figures", "matplotlib.pyplot"])
    return context


def _obey(arguments: list[str], log: Path) -> None:
    with open(log, "ab") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    from fsl_sage.cli import main as command

    sys.argv = ["fsl-sage", *arguments]
    command(arguments)


class Pace:
    """How long a run takes until its first round is over, and how long its rounds take."""

    def __init__(self, command: Command, out: Path) -> None:
        start = time.monotonic()
        while not rounds(out) and not command.ended(0.02):
            pass
        self.before = time.monotonic() - start
        if wrong := command.wrong():
            raise SystemExit(f"What is never killed went wrong: {wrong}")
        self.all = rounds(out)
        self.round = (time.monotonic() - start - self.before) / self.all

    def wait(self, ended: Callable[[float], bool], out: Path, rng: random.Random, left: int) -> bool:
        """Until a random moment; whether what runs has not ended then.

        A machine is busier at one time than at another: how long a round takes is what the last ones took.

        Args:
            ended: Waits so many seconds for the end; whether it has come.
            out: Where the run, or the grid, is.
            rng: Draws the moment.
            left: How many kills of this run are to come, this one among them: each has its part of the rounds left.
        """
        seen, begin = rounds(out), None
        over = rng.randint(seen, seen + -(-max(self.all - seen, 0) // left))
        while (now := rounds(out)) < over:
            if now > seen:
                self.round = self.round if begin is None else (time.monotonic() - begin) / (now - seen)
                seen, begin = now, time.monotonic()
            if ended(0.02):
                return False
        if ended(rng.uniform(0, self.round if over else self.before)):
            self.round, self.before = self.round / 2, self.before / 2
            return False
        return True


def rounds(out: Path) -> int:
    """How many are over, of a run or of the runs of a grid."""
    files = [*out.glob("metrics.jsonl"), *out.glob("*/metrics.jsonl")]
    return sum(file.read_bytes().count(b"\n") for file in files)


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


def kill(process: int) -> None:
    """Kill by -9, and remember it if there was something to kill."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
        HITS.append(process)


# The places


def kill_the_run(*options: str) -> Place:
    """The process that a user has started, with any engine."""

    @contextmanager
    def place(folder: Path) -> Iterator[Trial]:
        whole = folder / "whole"
        pace = Pace(Command("run", *options, "--out", whole, log=folder / "log"), whole)

        def trial(fresh: Path, rng: random.Random, kills: int) -> str:
            out, log = fresh / "run", fresh / "log"
            for left in range(kills, 0, -1):
                again = (out / "config.json").exists()
                words = ["resume", out] if again else ["run", *options, "--out", out]
                command = Command(*words, log=log)
                if not pace.wait(command.ended, out, rng, left):
                    break
                kill(command.id)
                command.ended(PATIENCE)
                if (out / "result.json").exists() or not (out / "config.json").exists():
                    HITS.pop()  # it was over, or there is nothing yet to go on with
            over = (out / "result.json").exists() or not HITS
            wrong = "" if over else Command("resume", out, log=log).wrong()
            return wrong or (", ".join(differences(whole, out)) if HITS else "")

        yield trial

    return place


def kill_the_driver(folder: Path) -> AbstractContextManager[Trial]:
    """The process that a user has started, on a cluster that lives on."""

    @contextmanager
    def place() -> Iterator[Trial]:
        with _cluster() as (_, address), kill_the_run(*RUN, *on_ray(address))(folder) as trial:
            yield trial

    return place()


def kill_an_actor(name: str) -> Place:
    """One of Ray's actors, on a cluster that lives on; the run must go on by itself."""

    @contextmanager
    def place(folder: Path) -> Iterator[Trial]:
        with _cluster() as (cluster, address):
            whole, options = folder / "whole", [*RUN, *on_ray(address)]
            pace = Pace(Command("run", *options, "--out", whole, log=folder / "log"), whole)

            def actors() -> list[int]:
                return [id for id, said in descendants(cluster) if said.startswith(f"ray::{name}")]

            def trial(fresh: Path, rng: random.Random, kills: int) -> str:
                out, log = fresh / "run", fresh / "log"
                old = set(actors())  # of the run before, on their way out
                command = Command("run", *options, "--out", out, log=log)
                for left in range(kills, 0, -1):
                    running = pace.wait(command.ended, out, rng, left)
                    while running and not (found := sorted(set(actors()) - old)):
                        running = not command.ended(0.1)
                    if not running or (out / "result.json").exists():
                        break
                    old |= {one := rng.choice(found)}
                    kill(one)
                if wrong := command.wrong():
                    again = Command("resume", out, log=fresh / "resumed.log").wrong() or ", ".join(
                        differences(whole, out)
                    )
                    return f"it did not go on by itself: {wrong}; resumed: {again or 'the same bits'}"
                return ", ".join(differences(whole, out))

            yield trial

    return place


def on_ray(address: str) -> list[str]:
    """The options of a run on this cluster."""
    return ["--engine", "ray", "--ray-address", address]


@contextmanager
def _cluster() -> Iterator[tuple[int, str]]:
    """A Ray cluster on this machine, by Ray's own utility: the process that has started it, and its address."""
    code = (
        "import sys; from ray.cluster_utils import Cluster;"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 2, 'include_dashboard': False});"
        "print(cluster.address, flush=True); sys.stdin.read(); cluster.shutdown()"
    )
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    for _ in range(5):  # Ray gives up when a busy machine takes more than 30 s to start a cluster
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if address := process.stdout.readline().strip():
            break
    try:
        yield process.pid, address
    finally:
        process.stdin.close()  # then it ends by itself, and the cluster with it
        process.wait(PATIENCE)


@contextmanager
def kill_a_comparison(folder: Path) -> Iterator[Trial]:
    """The command that runs a grid; the same command goes on."""
    whole = folder / "whole"
    pace = Pace(Command("compare", *GRID, "--out", whole, log=folder / "log"), whole)
    names = sorted(file.parent.name for file in whole.glob("*/result.json"))

    def trial(fresh: Path, rng: random.Random, kills: int) -> str:
        out, log = fresh / "grid", fresh / "log"
        for left in range(kills, 0, -1):
            command = Command("compare", *GRID, "--out", out, log=log)
            if not pace.wait(command.ended, out, rng, left):
                break
            kill(command.id)
            command.ended(PATIENCE)
        wrong = Command("compare", *GRID, "--out", out, log=log).wrong()
        found = [f"{name}: {file}" for name in names if not wrong for file in differences(whole / name, out / name)]
        return wrong or ", ".join(found)

    yield trial


def on_flower(name: str) -> Place:
    """Flower's processes; what they need is imported when it is needed."""

    def place(folder: Path) -> AbstractContextManager[Trial]:
        from benchmarks import chaos_on_flower

        return getattr(chaos_on_flower, name)(folder)

    return place


PLACES: dict[str, Place] = {
    "local": kill_the_run(*RUN),
    "keep-best": kill_the_run(*RUN, "--keep", "best", "--checkpoint-every", "2"),
    "sl": kill_the_run(*ANY, "--algorithm", "sl"),
    "fedgkt": kill_the_run(*ANY, "--algorithm", "fedgkt"),
    "compare": kill_a_comparison,
    "ray-driver": kill_the_driver,
    "ray-worker": kill_an_actor("WorkerActor"),
    "ray-server": kill_an_actor("ServerActor"),
    "flower-server": on_flower("kill_the_server"),
    "flower-site": on_flower("kill_a_site"),
}


def play(place: str, kills: int, seed: int, kills_a_run: int = 2) -> int:
    """Kill so often at a place, in one run up to `kills_a_run` times; print how it went. The runs that went wrong."""
    killed, runs, wrong = 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="fsl-sage-chaos-") as directory, PLACES[place](Path(directory)) as trial:
        for number in count():
            if killed >= kills:
                break
            HITS.clear()
            fresh = Path(directory) / f"trial-{number}"
            fresh.mkdir()
            rng = random.Random(f"{seed} {place} {number}")
            start = time.monotonic()
            said = trial(fresh, rng, min(rng.randint(1, kills_a_run), kills - killed))
            killed, runs, wrong = killed + len(HITS), runs + bool(HITS or said), wrong + bool(said)
            how = f"{len(HITS)} kills in {time.monotonic() - start:.0f} s"
            print(f"  {place} {killed}/{kills}: {how}, {said or 'the same bits'}", flush=True)
    print(f"{place}: {killed} kills in {runs} runs, {runs - wrong} of {runs} gave the same bits", flush=True)
    return wrong


def main() -> None:
    """Exit code 1 if any run went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="for each place")
    parser.add_argument("--kills-a-run", type=int, default=2, help="how often one run is killed at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=PLACES, default=list(PLACES))
    given = parser.parse_args()
    sys.exit(bool(sum(play(place, given.kills, given.seed, given.kills_a_run) for place in given.only)))


if __name__ == "__main__":
    from benchmarks import chaos  # one module with one list of kills, by whichever name it is imported

    chaos.main()

"""Places the runs of a comparison on a Ray cluster: each whole run on one machine with room. Its files come back here.

Every checkpoint comes back too, so a run whose machine is lost is resumed on another one.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import ray

from fsl_sage.compare.grid_run import GridRun
from fsl_sage.compare.one_run import LOG, start_process
from fsl_sage.compare.placement import Placement
from fsl_sage.config import Config
from fsl_sage.engines.ray.cluster import connect
from fsl_sage.engines.ray.pool import LOSSES
from fsl_sage.errors import InputError
from fsl_sage.records.files import write_bytes
from fsl_sage.records.lock import LockedError
from fsl_sage.records.run_directory import LOCK, RunDirectory

Files = dict[str, bytes | None]
"""Contents by path below the run's directory; None for a file that is gone."""

TRIES = 5
"""How often a run is started whose machine is lost every time."""

# A reader must never find a checkpoint that is ahead of the metrics, nor a result without its model. Writers here and
# there end with these; readers begin with them.
LAST = ("checkpoint.safetensors", "result.json")


@contextmanager
def on_cluster(config: Config, runs: int, jobs: int | None, *, own_modules: bool = False) -> Iterator[Placement]:
    """The placement of so many runs on the cluster that the configuration names; `jobs` at once at most."""
    own = connect(config, own_modules=own_modules)
    try:
        at_once, workers, gpus = _fit(config, runs, jobs)
        seat = ray.remote(num_cpus=workers * config.threads, num_gpus=gpus)(Seat)
        yield Placement(at_once, workers, partial(_start, seat))
    finally:
        if own:
            ray.shutdown()


def _fit(config: Config, runs: int, jobs: int | None) -> tuple[int, int, float]:
    """(runs at once, workers of each, GPUs of each) that fit on the machines of the cluster."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    rooms = [int(node["CPU"]) // config.threads for node in nodes]
    gpus = _gpus(config, sum(node.get("GPU", 0) for node in nodes))
    if (config.workers or 1) > max(rooms, default=0):
        raise InputError(
            f"--workers {config.workers or 1} with --threads {config.threads} does not fit on a machine of the "
            f"cluster, whose largest has {max((node['CPU'] for node in nodes), default=0):g} CPUs."
        )
    workers = config.workers or min(min(room for room in rooms if room), max(1, sum(rooms) // (jobs or runs)))
    at_once = sum(room // workers for room in rooms)
    if gpus:
        at_once = min(at_once, sum(int(node.get("GPU", 0) / gpus) for node in nodes))
    return max(1, min(at_once, runs, jobs or runs)), workers, gpus


def _gpus(config: Config, have: float) -> float:
    if config.ray_num_gpus is not None:
        return config.ray_num_gpus
    return 1 if have and config.device != "cpu" else 0


def _start(seat: "type[Seat]", run: GridRun, workers: int) -> "RemoteRun":
    return RemoteRun(seat, run.directory, workers)


class RemoteRun:
    """A run somewhere on the cluster, with the interface of a process. It holds the lock of the directory here."""

    def __init__(self, seat: "type[Seat]", directory: RunDirectory, workers: int) -> None:
        self.returncode: int | None = None
        self._directory = directory.path
        self._workers = workers
        self._make_seat = seat
        self._tries = 0
        self._lock = ExitStack()
        try:
            self._lock.enter_context(directory.held())
        except LockedError as error:  # which the process of a run on this machine would print
            write_files(self._directory, {LOG: f"{error}\n".encode()})
            self.returncode = 2
        else:
            self._sit_down()

    def _sit_down(self) -> None:
        self._tries += 1
        self._seat = self._make_seat.remote()  # type: ignore[attr-defined]
        self._news = self._seat.start.remote(read_files(self._directory), self._workers)

    def poll(self) -> int | None:
        """Write what the run has sent since; returns its exit code once it has ended."""
        if self.returncode is None and ray.wait([self._news], timeout=0)[0]:
            try:
                files, self.returncode = ray.get(self._news)
                write_files(self._directory, files)
                self._news = self._seat.news.remote()
            except LOSSES:
                if RunDirectory(self._directory).finished():  # all had come back but the exit code
                    self.returncode = 0
                elif self._tries == TRIES:
                    self.returncode = 1
                    write_files(self._directory, {LOG: f"Its machine was lost {TRIES} times.\n".encode()})
                else:
                    self._sit_down()
            if self.returncode is not None:
                self.terminate()
        return self.returncode

    def communicate(self) -> None:
        """Does nothing: `poll` has brought everything."""

    def terminate(self) -> None:
        """Stop the run on its machine, and let its directory go."""
        with self._lock:
            if self._tries:
                ray.wait([self._seat.leave.remote()], timeout=10)
                ray.kill(self._seat)


class Seat:
    """A run's place on its machine: a directory, and the process of the run in it."""

    def start(self, files: Files, workers: int) -> tuple[Files, int | None]:
        """Start or resume the run in these files."""
        self._place = tempfile.TemporaryDirectory(prefix="fsl-sage-")
        self._path = Path(self._place.name)
        write_files(self._path, files)
        self._known = _marks(self._path)
        # The run ends when its standard input does: with this actor, however that goes.
        self._process = start_process(self._path, workers)
        return {}, None

    def news(self) -> tuple[Files, int | None]:
        """The files that have changed since, and the exit code if the run has ended."""
        code = self._process.poll()  # first: what it wrote before its end is then in the files
        marks = _marks(self._path)
        changed = {name for name, mark in marks.items() if self._known.get(name) != mark}
        # A new checkpoint may have come between two looks, and what was written before it with it: take everything.
        files = read_files(self._path, None if changed.intersection(LAST) else changed)
        later = _marks(self._path)
        if code is None and any(later.get(name) != marks.get(name) for name in LAST):
            return {}, None  # a checkpoint came meanwhile, and files that the one before named may be gone: next time
        files |= dict.fromkeys(set(self._known) - set(marks))
        self._known = marks
        return files, code

    def leave(self) -> None:
        """Stop the run, if it is still running, and remove its directory."""
        self._process.terminate()
        self._process.communicate()
        self._place.cleanup()


def _marks(path: Path) -> dict[str, tuple[int, int]]:
    """(time of change, size) by file. Files that are still being written are left out, and the lock of a machine."""
    marks = {}
    for file in path.rglob("*"):
        if file.suffix != ".part" and file.name != LOCK and file.is_file():
            with suppress(FileNotFoundError):
                stat = file.stat()
                marks[str(file.relative_to(path))] = stat.st_mtime_ns, stat.st_size
    return marks


def read_files(path: Path, names: "set[str] | None" = None) -> Files:
    """The contents of the named files of a run's directory; of all files if none are named."""
    names = set(_marks(path)) if names is None else names
    files: Files = {}
    for name in _in_order(names, first=True):
        with suppress(FileNotFoundError):
            files[name] = (path / name).read_bytes()
    return files


def write_files(path: Path, files: Files) -> None:
    """Write files into a run's directory; then, when what replaces them is there, remove those that are None."""
    for name in _in_order(set(files), first=False):
        if (content := files[name]) is not None:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path / name, content)
    for name in files:
        if files[name] is None:
            (path / name).unlink(missing_ok=True)


def _in_order(names: set[str], *, first: bool) -> list[str]:
    special = [name for name in LAST if name in names]
    others = sorted(names.difference(LAST))
    return [*special, *others] if first else [*others, *special]

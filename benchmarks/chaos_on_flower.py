"""The places of `benchmarks.chaos` on Flower: a SuperLink with TLS and three SuperNodes, one federation for all trials.

The apps' processes are forked from one that has everything imported, as in the tests of federations: they are as real
as any, with ids of their own, and a trial takes seconds where it would take minutes.

A client whose site dies misses the round, and the rounds until Flower lets its node back: that is the policy, and so
the bits are not those of a run that nothing happened to. They are those of a run in which the same clients were absent
from the same rounds. That run is played afterwards, in one process and with nodes that never die, and compared.
"""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

from tests.deploy import prestarted
from tests.engines.flower_grid import InProcessGrid

from benchmarks.chaos import PATIENCE, RUN, Command, Pace, Trial, differences, kill
from fsl_sage.algorithms import resolve
from fsl_sage.config import Config
from fsl_sage.deploy.agreement import Agreement
from fsl_sage.deploy.app import agree, write_app, write_sites
from fsl_sage.deploy.client_app import make_client_app
from fsl_sage.deploy.processes import NAME, LoopbackFederation
from fsl_sage.deploy.server_app import serve
from fsl_sage.records.run_directory import RunDirectory

ROOT = Path(__file__).parents[1]
OPTIONS = [*RUN[: RUN.index("--rounds")], *RUN[RUN.index("--rounds") + 2 :], "--rounds", "4"]
"""A round on Flower takes long, and what can go wrong in one does not get more by its number."""

# Each app writes down its process, so that it can be killed.
SERVER_APP = """\
import os
from pathlib import Path

from fsl_sage.deploy.server_app import make_server_app

Path({folder!r}, "server-process").write_text(str(os.getpid()))
app = make_server_app(Path(__file__).with_name("config.json"))
"""
CLIENT_APP = """\
import os
from pathlib import Path

from fsl_sage.deploy.client_app import make_client_app


def remembered(message, context, call_next):
    file = Path({folder!r}, f"client-process-{{context.node_config['client']}}")
    file.write_text(str(os.getpid()))
    reply = call_next(message, context)
    file.unlink(missing_ok=True)
    return reply


app = make_client_app(Path(__file__).with_name("config.json"), [remembered])
"""


class Nodes(LoopbackFederation):
    """A SuperLink and the sites of one app."""

    def __init__(self, folder: Path) -> None:
        (folder / "nodes").mkdir()
        super().__init__(folder / "nodes")
        self.folder = folder
        self._begun: dict[int, tuple[float, int]] = {}
        """By client, when its SuperNode was started last, and how much there was in its log."""
        self._address = prestarted.write_commands(folder / "commands")
        paths = {"PATH": f"{folder / 'commands'}:{self.environment['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        self.environment = {**self.environment, **paths}

    def __enter__(self) -> "Nodes":
        super().__enter__()
        self._forks = prestarted.start(self._address, self.environment, self.folder / "apps.log")
        return self

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._forks.kill()
        self._forks.wait()

    def set_up(self, config: Config, agreement: Agreement, sites: list[Path]) -> None:
        """The app, the SuperLink, and a SuperNode for each site."""
        self.app, self.sites = self.folder / "app", sites
        write_app(self.app, config, agreement)
        for name, text in (("server_app", SERVER_APP), ("client_app", CLIENT_APP)):
            (self.app / "fsl_sage_app" / f"{name}.py").write_text(text.format(folder=str(self.folder)))
        self.start_superlink()
        self.register(range(len(sites)))
        for client in range(len(sites)):
            self.start_site(client)

    def start_site(self, client: int) -> None:
        """The SuperNode of a client."""
        log = self.directory / "logs" / f"node-{client}.log"
        self._begun[client] = time.monotonic(), log.stat().st_size if log.exists() else 0
        self.start_node(client, self.sites[client])

    def supervise(self) -> None:
        """Start SuperNodes again that have ended, as the guide asks: Flower turns a killed one away for a minute."""
        for client, (when, _) in self._begun.items():
            if self._running[f"node-{client}"].poll() is not None and time.monotonic() > when + 5:
                self.start_site(client)

    def connected(self) -> list[int]:
        """The clients whose SuperNodes the SuperLink has let in."""
        logs = {client: self.log(f"node-{client}").encode()[start:] for client, (_, start) in self._begun.items()}
        living = [client for client in logs if self._running[f"node-{client}"].poll() is None]
        return [client for client in living if b"SuperNode ID: " in logs[client]]

    def start_run(self, run: Path) -> None:
        """`flwr run`; the same command goes on with a run that was interrupted."""
        server = self.folder / "server-process"
        server.unlink(missing_ok=True)
        settings = f'run-directory="{run}" timeout={PATIENCE} join-timeout={PATIENCE}'
        self.flwr("run", str(self.app), NAME, "--run-config", settings)
        while not server.exists():
            time.sleep(0.1)

    def process(self, name: str) -> int:
        """An app's process; 0 if it does not live."""
        file = self.folder / name
        number = file.read_text() if file.exists() else ""
        return int(number) if number and Path("/proc", number).exists() else 0

    def ended(self, seconds: float) -> bool:
        """Whether the ServerApp ends within these seconds."""
        deadline = time.monotonic() + seconds
        while (living := self.process("server-process")) and time.monotonic() < deadline:
            self.supervise()
            time.sleep(0.05)
        return not living

    def finished(self, run: Path) -> bool:
        """Wait for the end of the ServerApp; whether the run has come to its own."""
        self.ended(PATIENCE)
        return (run / "result.json").exists()

    def kill_site(self, client: int, what: str) -> None:
        """End the process of a ClientApp, if there is one now, or of a SuperNode, or both."""
        app = self.process(f"client-process-{client}") if what != "node" else 0
        if app and what == "both":
            with suppress(ProcessLookupError):  # both are one kill
                os.kill(app, signal.SIGKILL)
        kill(app if app and what == "app" else self._running[f"node-{client}"].pid)

    def said(self) -> str:
        """The last words of the apps."""
        return " ".join((self.folder / "apps.log").read_text(errors="replace").split())[-400:]


@contextmanager
def federation(folder: Path) -> Iterator[tuple[Nodes, Path, Pace]]:
    """A federation, the run of the local engine, and how long its rounds take on Flower, where nothing happens."""
    pace = Pace(Command("run", *OPTIONS, "--out", folder / "whole", log=folder / "log"), folder / "whole")
    config = replace(resolve(RunDirectory(folder / "whole").config()), out=None)
    agreement, shares = agree(config, None)
    with Nodes(folder) as nodes:
        nodes.set_up(config, agreement, write_sites(folder / "sites", shares, agreement))
        begin = time.monotonic()
        nodes.start_run(folder / "first")
        if not nodes.finished(folder / "first"):
            raise SystemExit(f"The run that is never killed failed: {nodes.said()}")
        pace.before = pace.round = (time.monotonic() - begin) / pace.all
        if differ := unlike(folder / "whole", folder / "first"):
            raise SystemExit(f"The run that is never killed is not the local engine's: {differ}")
        yield nodes, folder / "whole", pace


@contextmanager
def kill_the_server(folder: Path) -> Iterator[Trial]:
    """The process of the ServerApp; the same `flwr run` goes on."""
    with federation(folder) as (nodes, whole, pace):

        def trial(fresh: Path, rng: random.Random, kills: int) -> str:
            run = fresh / "run"
            nodes.start_run(run)
            for left in range(kills, 0, -1):
                running = pace.wait(nodes.ended, run, rng, left)
                if not running or (run / "result.json").exists():
                    break
                kill(nodes.process("server-process"))
                nodes.start_run(run)
            if not nodes.finished(run):
                return f"it did not come to its end: {nodes.said()}"
            return unlike(whole, run)

        yield trial


@contextmanager
def kill_a_site(folder: Path) -> Iterator[Trial]:
    """A SuperNode, the process of its ClientApp, or both; the node is started again, and the run goes on by itself."""
    with federation(folder) as (nodes, _, pace):

        def trial(fresh: Path, rng: random.Random, kills: int) -> str:
            run = fresh / "run"
            nodes.start_run(run)
            for left in range(kills, 0, -1):
                if pace.wait(nodes.ended, run, rng, left) and not (run / "result.json").exists():
                    found, what = nodes.connected(), rng.choice(("node", "app", "both"))
                    if found:
                        nodes.kill_site(rng.choice(found), what)
            for _ in range(3):  # where no client was left, the run has ended and says how to go on
                if nodes.finished(run):
                    return unlike(replayed(nodes, run, fresh), run)
                nodes.start_run(run)
            return f"it did not come to its end: {nodes.said()}"

        yield trial


def unlike(one: Path, run: Path) -> str:
    """What differs; which classes a site holds, its server does not know."""
    return ", ".join(name for name in differences(one, run) if name != "classes.csv")


def replayed(nodes: Nodes, run: Path, fresh: Path) -> Path:
    """The run in which the same clients were absent from the same rounds, at nodes that never die."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    absent = {(str(line["round"]), client) for line in map(json.loads, lines) for client in line["missing"]}

    def silent(client, message, reply):
        return None if (message.metadata.group_id, client) in absent else reply

    config_file = nodes.app / "fsl_sage_app" / "config.json"
    grid = InProcessGrid(make_client_app(config_file), silent)
    for client, site in enumerate(nodes.sites):
        grid.join(client, site, fresh / "state")
    options = {"data": "", "timeout": 0.1, "minimum": 1, "join-timeout": 1.0, "run-directory": str(fresh / "replay")}
    with open(fresh / "replay.log", "w") as said, redirect_stdout(said):
        return serve(config_file, grid, options).directory

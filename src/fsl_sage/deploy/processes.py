"""SuperLink, SuperNodes and the `flwr` command as processes of this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from fsl_sage.deploy.certificates import ServerFiles, write_node_key, write_server_files
from fsl_sage.errors import TrainingError

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower's settings here: it reports nothing, looks nothing up and installs nothing."""

HOST = "127.0.0.1"
NAME = "loopback"
"""The SuperLink's name in the configuration of the `flwr` command."""

START_SECONDS = 60.0
STOP_SECONDS = 10.0


class LoopbackFederation:
    """A SuperLink with TLS and authenticated nodes, and SuperNodes, all on this machine. Leaving it stops them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.environment = _environment(directory / "flwr")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[int, int] = {}

    def __enter__(self) -> "LoopbackFederation":
        for name in ("flwr", "keys", "logs", "state"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self.files = write_server_files(self.directory / "keys", [HOST, "localhost"])
        connection = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{HOST}:{self.port}"\n'
        connection += f'root-certificates = "{self.files.ca}"\n'
        (self.directory / "flwr" / "config.toml").write_text(connection)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for name in reversed(list(self._running)):  # the nodes before the SuperLink
            self.stop(name)

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it answers."""
        self._start("superlink", superlink_command(self.port, self.files))
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.port):
            if self._running["superlink"].poll() is not None or time.monotonic() > deadline:
                raise TrainingError(f"The SuperLink did not start:\n{self.log('superlink')}")
            time.sleep(0.1)

    def register(self, clients: Iterable[int]) -> None:
        """Make a key for each client's node and register it at the SuperLink."""

        def one(client: int) -> None:
            """Make one client's key and register it."""
            public = write_node_key(self.key(client))
            self.flwr("supernode", "register", str(public), NAME, "--name", f"client-{client}")

        with ThreadPoolExecutor() as side_by_side:
            list(side_by_side.map(one, clients))

    def start_node(
        self,
        client: int,
        data: Path,
        superlink_port: int | None = None,
        *,
        state: Path | None = None,
        memory: int | None = None,
        **has: Path,
    ) -> subprocess.Popen[bytes]:
        """The SuperNode of a client.

        Args:
            client: Its number.
            data: Its training examples.
            superlink_port: Where it finds the SuperLink, if not at its own port.
            state: Where it keeps its state; if not given, all nodes share a directory.
            memory: The bytes that each of its processes may take (RLIMIT_DATA).
            has: What else the site has: a tokenizer, a model.
        """
        address = f"{HOST}:{superlink_port or self.port}"
        self._ports.setdefault(client, free_port())
        command = node_command(
            address,
            self.files.ca,
            self.key(client),
            self._ports[client],
            client,
            data,
            state or self.directory / "state",
            **has,
        )
        return self._start(f"node-{client}", command, memory)

    def key(self, client: int) -> Path:
        """The path of the private key of a client's node."""
        return self.directory / "keys" / f"client-{client}"

    def flwr(self, *arguments: str) -> str:
        """Run the `flwr` command; returns what it prints."""
        done = subprocess.run(["flwr", *arguments], env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TrainingError(f"'flwr {' '.join(arguments[:2])}' failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a process that was started here."""
        process = self._running.pop(name)
        process.send_signal(how)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        """The output of a process so far."""
        return (self.directory / "logs" / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, command: Sequence[str], memory: int | None = None) -> subprocess.Popen[bytes]:
        if memory is not None:
            command = [sys.executable, "-c", _LIMITED, str(memory), *command]
        with open(self.directory / "logs" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._running[name] = process
        return process


_LIMITED = """\
import os, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs a command under a memory limit, which also holds for the processes that it starts."""


def superlink_command(port: int, files: ServerFiles) -> list[str]:
    """A SuperLink on loopback."""
    return [
        "flower-superlink",
        *("--host", HOST, "--port", str(port)),
        *("--ssl-ca-certfile", str(files.ca), "--ssl-certfile", str(files.certificate)),
        *("--ssl-keyfile", str(files.key)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def node_command(
    address: str, ca: Path, key: Path, port: int, client: int, data: Path, state: Path, **has: Path
) -> list[str]:
    """The SuperNode of a client; `port` is for its own processes and must differ between nodes of a machine."""
    paths = " ".join(f'{name}="{path}"' for name, path in {"data": data, "state": state, **has}.items())
    return [
        "flower-supernode",
        *("--superlink", address, "--root-certificates", str(ca)),
        *("--auth-supernode-private-key", str(key)),
        *("--host", HOST, "--port", str(port)),
        *("--node-config", f"client={client} {paths}"),
    ]


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _environment(home: Path) -> Mapping[str, str]:
    # Flower finds its own commands by PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    quick = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    return {**os.environ, **ENVIRONMENT, **quick, "PATH": path, "FLWR_HOME": str(home)}

"""Flower starts a process for every message, and each would spend seconds on importing torch. Here the commands that it
finds by PATH ask one process, which has everything imported, to fork. The forked processes are as real as any: they
have ids of their own, talk to Flower over its own channels, and can be killed."""

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from fsl_sage.deploy.processes import LoopbackFederation

ROOT = Path(__file__).parents[2]
COMMANDS = ("flwr-clientapp", "flwr-serverapp")
IMPORTED = (
    *("fsl_sage.deploy.client_app", "fsl_sage.deploy.server_app", "fsl_sage.deploy.site"),
    *("fsl_sage.records.figures", "torch._dynamo", "peft", "transformers.models.llama.modeling_llama"),
)
"""By the apps, when they are loaded, by torch.optim with the first optimizer, and by language models."""

SHIM = """\
#!{python} -IS
import json, os, resource, socket, sys
limits = resource.getrlimit(resource.RLIMIT_DATA)
with socket.socket(socket.AF_UNIX) as channel:
    channel.connect({address!r})
    channel.sendall(json.dumps([limits, os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode())
"""


def write_commands(directory: Path) -> Path:
    """The commands, in a directory for PATH; returns the address that the server must listen on."""
    address = directory / "socket"
    directory.mkdir()
    for name in COMMANDS:
        command = directory / name
        command.write_text(SHIM.format(python=sys.executable, address=str(address)))
        command.chmod(0o755)
    return address


def start(address: Path, environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """The server; it is ready when the socket is there."""
    with open(log, "ab") as out:
        command = [sys.executable, __file__, str(address)]
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


class ForkingFederation(LoopbackFederation):
    """A federation whose apps' processes are forked."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        directory.mkdir(parents=True)
        self._address = write_commands(directory / "commands")
        paths = {"PATH": f"{self._address.parent}:{self.environment['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        self.environment = {**self.environment, **paths}

    def __enter__(self) -> "ForkingFederation":
        super().__enter__()
        self._forks = start(self._address, self.environment, self.directory / "logs" / "apps.log")
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._forks.kill()
        self._forks.wait()


def serve(address: str) -> None:
    """Fork for every command that comes."""
    from flwr.superlink.cli import flwr_serverapp
    from flwr.supernode.cli import flwr_clientapp

    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
            importlib.import_module(name)
    commands = {"flwr-clientapp": flwr_clientapp, "flwr-serverapp": flwr_serverapp}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    while True:
        channel, _ = listener.accept()
        with channel, channel.makefile("rb") as words:
            limits, *arguments = json.load(words)
        if os.fork() == 0:
            listener.close()
            resource.setrlimit(resource.RLIMIT_DATA, tuple(limits))  # that of the node, not of the server here
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.argv = arguments
            commands[arguments[0]]()
            os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])

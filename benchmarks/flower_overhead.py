"""Bytes on the socket over payload, for ResNet-18 rounds on a real federation: python -m benchmarks.flower_overhead

Every SuperNode reaches the SuperLink through a proxy that counts what passes in both directions: TLS, HTTP, polling,
heartbeats and the app itself. The payload is what the run's ledger says. IP and TCP headers are not counted.
"""

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fsl_sage.config import AlignmentConfig, CodecConfig, Config, DataConfig, GivenOptions, ModelConfig
from fsl_sage.deploy.app import agree, write_app, write_sites
from fsl_sage.deploy.processes import HOST, NAME, LoopbackFederation
from fsl_sage.records.run_directory import RunDirectory

CONFIG = Config(
    algorithm="fsl-sage",
    clients=3,
    rounds=3,
    batch_size=128,
    options=GivenOptions({"upload_every": 1, "align_every": 2}, of_several=True),
    device="cpu",
    data=DataConfig(name="cifar10-mini", train_images=768, test_images=100),
    model=ModelConfig(name="resnet18", cut="layer2"),
    alignment=AlignmentConfig(samples=128, steps=2),
)


class CountingProxy:
    """Passes connections on to a port of this machine and counts the bytes."""

    def __init__(self, target: int) -> None:
        self.bytes = 0
        self._target = target
        self._lock = threading.Lock()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._start(self._serve, near, socket.create_connection((HOST, self._target)))

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            answers = self._start(self._pump, far, near)
            self._pump(near, far)
            answers.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one side is gone, and with it the connection
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    self.bytes += len(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Take no more connections, and wait for the end of those that there are; the nodes must have ended."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while self._threads:
            self._threads.pop().join(timeout=10)


def measure(config: Config, directory: Path, kind: type[LoopbackFederation] = LoopbackFederation) -> tuple[int, int]:
    """(bytes on the sockets, payload) of a whole run, on a federation of this kind."""
    agreement, shares = agree(config, None)
    write_app(directory / "app", config, agreement)
    sites = write_sites(directory / "sites", shares, agreement)
    with contextlib.ExitStack() as stack:
        federation = kind(directory / "federation")
        proxies: list[CountingProxy] = []
        stack.callback(lambda: [proxy.close() for proxy in proxies])  # after the federation, whose nodes use them
        stack.enter_context(federation)
        federation.start_superlink()
        federation.register(range(config.clients))
        proxies += [CountingProxy(federation.port) for _ in sites]
        for client, site in enumerate(sites):
            federation.start_node(client, site, proxies[client].port)
        options = f'run-directory="{directory / "run"}"'
        federation.flwr("run", str(directory / "app"), NAME, "--stream", "--run-config", options)
        metrics = RunDirectory(directory / "run").metrics()
        return sum(proxy.bytes for proxy in proxies), metrics[-1]["bytes_total"]


def main() -> None:
    """Print the ratio for each algorithm that runs on Flower."""
    coded = CodecConfig(preset="small")
    for algorithm, codec in (
        *((name, CodecConfig()) for name in ("fsl-sage", "cse-fsl", "fedavg")),
        ("fsl-sage", coded),
    ):
        with tempfile.TemporaryDirectory() as directory:
            moved, payload = measure(replace(CONFIG, algorithm=algorithm, codec=codec), Path(directory))
        overhead = moved / payload - 1
        name = f"{algorithm}, small" if codec.preset else algorithm
        print(f"{name:15} {moved:>13,} on the sockets, {payload:>13,} payload: {overhead:.2%} more", flush=True)


if __name__ == "__main__":
    main()

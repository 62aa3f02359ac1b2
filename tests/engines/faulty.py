"""Algorithms with a fault in them, in a module of their own so that Ray's processes can import it."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from fsl_sage.algorithms import Algorithm
from fsl_sage.roles.client import Client


def die_once(marker: Path) -> None:
    """kill -9 this process, but only the first time that anyone comes here."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Fault:
    """Something goes wrong with one client, in round 1 after its third local step."""

    def __init__(self, algorithm: type[Algorithm], marker: Path | None = None) -> None:
        self.algorithm = algorithm
        self.marker = marker
        self.Options, self.title, self.colour = algorithm.Options, algorithm.title, algorithm.colour

    def strike(self, client: int) -> None:
        raise NotImplementedError

    def __call__(self, config):
        return _with_fault(self.algorithm, self)(config)


def _with_fault(algorithm: type[Algorithm], fault: Fault) -> type[Algorithm]:
    class Faulty(algorithm):
        def local_round(self, client: Client, t: int):
            reply = None
            local_round = super().local_round(client, t)
            while True:
                try:
                    upload = local_round.send(reply)
                except StopIteration:
                    return
                if t == 1 and client.step_index >= 2:
                    fault.strike(client.id)
                reply = yield upload

    return Faulty


class Raises(Fault):
    def strike(self, client: int) -> None:
        if client == 1:
            raise ValueError("the disk is full")


class KillsItsWorker(Fault):
    def strike(self, client: int) -> None:
        if client == 1:
            die_once(self.marker)


class KillsEveryWorker(Fault):
    def strike(self, client: int) -> None:
        if client == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class KillsServer(Fault):
    """At the S-server, when it has taken a few uploads of round 1."""

    def __call__(self, config):
        marker = self.marker

        class Faulty(self.algorithm):
            def on_uploads(self, server, uploads: Sequence[int]):
                replies = super().on_uploads(server, uploads)
                if server.round == 1 and any(upload.values["step"] >= 2 for upload in uploads.values()):
                    die_once(marker)
                return replies

        return Faulty(config)

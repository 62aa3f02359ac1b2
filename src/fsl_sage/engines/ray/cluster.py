"""The Ray cluster of a run: joined or started, and how a run is laid out on it."""

import logging
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import AuthenticationError

from fsl_sage.config import Config
from fsl_sage.engines.process import import_path
from fsl_sage.engines.ray.actors import ServerActor, WorkerActor
from fsl_sage.engines.ray.leftovers import end_leftovers, remembered
from fsl_sage.errors import InputError, TrainingError

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@dataclass(frozen=True)
class Layout:
    """How many workers a run has, and what each of them and the S-server gets."""

    workers: int
    cpus: int
    """CPUs of a worker. The S-server reserves none: it mostly works while the workers wait, or waits for them."""
    gpus: float
    """GPUs of a worker, and of the S-server if there is one."""
    has_s_server: bool = True


@dataclass(frozen=True)
class Crew:
    """The actors of a run, or of several runs one after the other, which saves starting them again."""

    workers: Sequence[ActorHandle]
    server: ActorHandle | None

    def dismiss(self) -> None:
        """End the actors."""
        for actor in [*self.workers, self.server]:
            if actor is not None:
                ray.kill(actor)


def connect(config: Config, *, own_modules: bool = False) -> bool:
    """Join the cluster that the configuration names, or start one on this machine.

    Args:
        config: Its address, workers and threads decide.
        own_modules: Whether the cluster's processes import modules of the user's own. They then look for them where
            this process does; on other machines they must be under the same paths.

    Returns:
        Whether this call has connected; False if the process was connected before.
    """
    if ray.is_initialized():
        return False
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    more: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": import_path()}}} if own_modules else {}
    if config.ray_address is None:
        # There is room for all workers, also for more than there are cores. Only this machine can reach the cluster.
        room = max(os.cpu_count() or 1, (config.workers or 1) * config.threads)
        end_leftovers()
        own: dict[str, Any] = {"num_cpus": room, "_node_ip_address": "127.0.0.1", "include_dashboard": False}
        try:
            with remembered():
                ray.init("local", **own, **QUIET, **more)
        except Exception as error:  # Ray gives up after half a minute, by a plain Exception
            ray.shutdown()
            said = " ".join(str(error).split())
            raise TrainingError(
                f"Ray could not be started on this machine, try again when it has less to do: {said}"
            ) from None
        return True
    try:
        _knock(config.ray_address)
        ray.init(config.ray_address, **QUIET, **more)
    except AuthenticationError:
        raise InputError(
            f"--ray-address {config.ray_address} asks for a token, and there is none here: put that of the cluster's "
            "head into ~/.ray/auth_token, or into RAY_AUTH_TOKEN."
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--ray-address {config.ray_address} cannot be reached ({error}): give HOST:PORT of the cluster's head, "
            "or auto on a machine of the cluster; with RAY_AUTH_MODE=token and the head's token where it asks for one."
        ) from None
    return True


def _knock(address: str) -> None:
    """Fail fast if the address cannot be reached: Ray itself would try for minutes."""
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()


def lay_out(config: Config, clients: int, *, has_s_server: bool) -> Layout:
    """Fit the run to the cluster."""
    have = ray.cluster_resources()
    room = int(have.get("CPU", 0)) // config.threads
    gpus = int(have.get("GPU", 0))
    usual = min(gpus or room, room) if config.device != "cpu" else room  # a GPU is one worker's, and the S-server's
    workers = min(config.workers or max(usual, 1), clients)
    if workers > room:
        raise InputError(
            f"--workers {workers} with --threads {config.threads} does not fit on the cluster, which has "
            f"{have.get('CPU', 0):g} CPUs: give fewer workers, or add machines."
        )
    return Layout(workers, config.threads, _share(config, gpus, workers + has_s_server), has_s_server)


def _share(config: Config, have: int, actors: int) -> float:
    """The share of a GPU that each actor gets."""
    if config.ray_num_gpus is not None:
        if config.ray_num_gpus * actors > have:
            raise InputError(
                f"--ray-num-gpus {config.ray_num_gpus:g} for each of {actors} actors does not fit on the cluster, "
                f"which has {have} GPUs: give a smaller share, or fewer workers."
            )
        return config.ray_num_gpus
    if not have or config.device == "cpu":
        return 0
    # The same number of actors on each GPU, and never one actor across two.
    return 1 / math.ceil(actors / have)


def start_crew(layout: Layout) -> Crew:
    """Start the actors. Ray starts a worker that dies again; a dead S-server loses its state."""
    worker = ray.remote(num_cpus=layout.cpus, num_gpus=layout.gpus, max_restarts=-1)(WorkerActor)
    server = ray.remote(num_cpus=0, num_gpus=layout.gpus, concurrency_groups={"intake": 1})(ServerActor)
    return Crew([worker.remote() for _ in range(layout.workers)], server.remote() if layout.has_s_server else None)

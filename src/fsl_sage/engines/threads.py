"""The workers of one process: threads, each with its own modules, that train clients and do other jobs."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from fsl_sage.activity import now
from fsl_sage.engines.base import Setup
from fsl_sage.engines.process import prepare_process
from fsl_sage.engines.worker import Worker
from fsl_sage.roles.server_jobs import Job
from fsl_sage.roles.work import Settings

Item = TypeVar("Item")
Result = TypeVar("Result")

_interrupted: list[ThreadPoolExecutor] = []
"""The threads of runs that were interrupted in this process: they may still be at work."""


class Threads:
    """As many workers as the configuration asks for, never more than there are clients."""

    def __init__(self, setup: Setup) -> None:
        config = setup.settings.config
        self._settings = setup.settings
        count = number_of_workers(setup.settings, len(setup.examples))
        self._threads_before = torch.get_num_threads()
        prepare_process(config.threads, setup.settings.device)
        self.workers = [Worker(setup) for _ in range(count)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.workers:
            self._free.put(worker)
        self._pool = ThreadPoolExecutor(count, "worker", torch.set_num_threads, (config.threads,))

    @contextmanager
    def free_worker(self) -> Iterator[Worker]:
        """A worker for this context alone."""
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    def map(self, call: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Call a function with each item, in parallel; yields the results in the order of the items."""
        return self._pool.map(call, items)

    def spread(self, job: Job, shared: Any, items: Sequence[Any]) -> list[Any]:
        """Run a job on each item, in parallel, each with a free worker's modules; results in the order of the items."""

        def one(item: Any) -> Any:
            with self.free_worker() as worker:
                return job(worker.workbench, self._settings, shared, item)

        return list(self.map(one, items))

    def close(self) -> None:
        """Stop the threads. After an interrupt their current work is not waited for; the next run does that."""
        interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if interrupted:
            _interrupted.append(self._pool)
        self._pool.shutdown(wait=not interrupted, cancel_futures=True)
        torch.set_num_threads(self._threads_before)


def wait_for_interrupted() -> None:
    """Wait until no thread of an interrupted run is at work: it shares torch's generator with the next run's."""
    while _interrupted:
        now("waiting for the threads of an interrupted run")
        _interrupted[-1].shutdown()
        _interrupted.pop()


def number_of_workers(settings: Settings, clients: int) -> int:
    """How many clients train side by side: by default as many as there are cores, or one on a GPU.

    Threads share torch's generator, so a model that draws in forward trains one client at a time.
    """
    if settings.draws:
        return 1
    usual = (os.cpu_count() or 1) if settings.device.type == "cpu" else 1  # a GPU is one client's at a time
    return min(settings.config.workers or usual, clients)

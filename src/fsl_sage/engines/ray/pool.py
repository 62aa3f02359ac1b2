"""Worker actors that share a list of calls; what a dead worker had begun is called again."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from fsl_sage.engines.base import LostError
from fsl_sage.errors import TrainingError
from fsl_sage.roles.server_jobs import Job

TRIES = 5
"""The number of tries of a call whose worker dies every time."""

PATIENCE = 600.0
"""Seconds that a run waits for a worker when all have died."""

PAUSE = 0.2
"""Seconds between two checks whether a worker is back."""

Call = Callable[[ActorHandle], Sequence[ray.ObjectRef]]
"""Makes a remote call of a worker. The first result says that it is done; the others are passed on as they are."""


class WorkerDiedError(TrainingError):
    """A worker died while it was needed."""


class UnpreparedError(RuntimeError):
    """A worker has died and was started again before this was noticed."""


CANNOT_START = (ActorDiedError, ActorUnschedulableError)
"""The errors of an actor that Ray will not start again."""

LOSSES = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, *CANNOT_START)
"""The errors of an actor that was lost. Where Ray knows the reason it names that: too little memory, or the machine."""

DEATHS = (*LOSSES, UnpreparedError)
"""The errors by which the death of a worker shows."""

GREATER_LOSSES = (ObjectLostError, LocalRayletDiedError)
"""The errors of a greater loss than that of an actor: objects of the store, or Ray's own process on this machine."""


class Pool:
    """Worker actors, which Ray starts again when they die."""

    def __init__(self, workers: Sequence[ActorHandle], setup: ray.ObjectRef) -> None:
        self.workers = workers
        self._setup = [setup]

    def run(self, calls: Sequence[Call]) -> list[tuple[Any, ...] | WorkerDiedError]:
        """Make all calls in this order, each with the first free worker; returns the results in the same order."""
        results: dict[int, tuple[Any, ...] | WorkerDiedError] = {}
        waiting, tries = deque(range(len(calls))), Counter[int]()
        free = list(self.workers)
        busy: dict[ray.ObjectRef, tuple[ActorHandle, int, Sequence[ray.ObjectRef]]] = {}
        restarting: dict[ray.ObjectRef, ActorHandle] = {}
        deadline = time.monotonic() + PATIENCE
        while len(results) < len(calls):
            while free and waiting:
                worker, index = free.pop(0), waiting.popleft()
                made = calls[index](worker)
                busy[made[0]] = worker, index, made[1:]
            done = _first([*busy, *restarting], None if busy else deadline)
            if done in restarting:
                worker = restarting.pop(done)
                if _is_up(done):
                    free.append(worker)
                else:
                    restarting[worker.prepare.remote(self._setup)] = worker
                continue
            worker, index, rest = busy.pop(done)
            deadline = time.monotonic() + PATIENCE
            try:
                results[index] = (fetch(done), *rest)
                free.append(worker)
            except DEATHS as error:
                restarting[worker.prepare.remote(self._setup)] = worker
                tries[index] += 1
                if tries[index] < TRIES:
                    waiting.appendleft(index)
                else:
                    results[index] = WorkerDiedError(f"its worker died {TRIES} times: {error}")
        return [results[index] for index in range(len(calls))]

    def spread(self, job: Job, shared: Any, items: Sequence[Any]) -> list[Any]:
        """Run a job on each item, in parallel, each with a worker's modules; results in the order of the items."""
        reference = ray.put(shared)

        def call(item: Any, worker: ActorHandle) -> Sequence[ray.ObjectRef]:
            return [worker.call.remote(job, reference, item)]

        results = []
        for result in self.run([partial(call, item) for item in items]):
            if isinstance(result, WorkerDiedError):
                raise result
            results.append(result[0])
        return results

    def prepare(self) -> None:
        """Wait until every worker is ready."""
        answers = [worker.prepare.remote(self._setup) for worker in self.workers]
        for worker, answer in zip(self.workers, answers, strict=True):
            deadline = time.monotonic() + PATIENCE
            while not _is_up(_first([answer], deadline)):
                answer = worker.prepare.remote(self._setup)


def _first(references: list[ray.ObjectRef], deadline: float | None) -> ray.ObjectRef:
    left = None if deadline is None else deadline - time.monotonic()
    # A worker that dies whenever it is started answers at once, again and again: only the clock ends that.
    done = ray.wait(references, num_returns=1, timeout=left)[0] if left is None or left > 0 else []
    if not done:
        raise TrainingError(f"No worker came back within {PATIENCE:g} s; the last checkpoint is kept.")
    return done[0]


def _is_up(answer: ray.ObjectRef) -> bool:
    """Whether a worker is ready; one that is just being started again is not."""
    try:
        fetch(answer)
    except CANNOT_START as error:
        raise TrainingError(f"A worker cannot be started: {error}") from error
    except LOSSES:
        time.sleep(PAUSE)
        return False
    return True


def fetch(reference: ray.ObjectRef) -> Any:
    """The value; errors as they were raised where it was made, and one of LOSSES where its actor was lost."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raised, told = error.cause or error, error
    except GREATER_LOSSES as error:
        raised, told = error, error
    if isinstance(raised, GREATER_LOSSES):
        raised = LostError(f"A machine of the cluster was lost, and with it a part of the run: {raised}")
    raise raised from told

"""What runs in Ray's processes: workers that serve clients, and the S-server."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor, nn

from fsl_sage.devices import pick_device
from fsl_sage.engines.base import ClientError, Delivery, LostError, Outcome, Replies, Setup, Uploads
from fsl_sage.engines.intake import Intake
from fsl_sage.engines.process import prepare_process
from fsl_sage.engines.ray.arrays import carry_tensors_as_arrays, to_device
from fsl_sage.engines.ray.pool import LOSSES, Pool, UnpreparedError
from fsl_sage.engines.server import HostedServer
from fsl_sage.engines.worker import Conversation, Worker, copied
from fsl_sage.roles.copies import Loss
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.roles.s_server import SServer
from fsl_sage.roles.server_jobs import Job
from fsl_sage.roles.work import Workbench
from fsl_sage.units import MIB
from fsl_sage.wire.ledger import Entry, Ledger
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import Message, Tensors

Common = tuple[Parts, Mapping[str, Tensors], frozenset[int], int | None]
"""What all clients of a round get: the averaged weights by part, what the F-server sends along by kind, for which
clients these weights are new after an absence, and whose first step is measured."""


class WorkerActor:
    """A worker in a process of its own. Client states come with each call and go back: it may die at any time.

    While clients train here it has the parts that a client holds. The other parts stay in the object store until there
    is a job for them, such as the evaluation, and go when the next client comes.
    """

    def __init__(self) -> None:
        # Ray starts a dead worker again, but cannot be relied on to give it the setup again.
        self._prepared: Worker | None = None
        self._setup: ray.ObjectRef | None = None
        self._all_parts: Workbench | None = None
        self._conversations: dict[int, Conversation] = {}
        self._outcomes: dict[int, Outcome | ClientError] = {}

    def prepare(self, setup: list[ray.ObjectRef]) -> None:
        """Must be called first in a run, and again after the worker has died. Fetches the setup if it is not here."""
        if self._setup is None or self._setup.hex() != setup[0].hex():
            whole: Setup = ray.get(setup[0])
            self._prepared = Worker(settle(whole.only(whole.algorithm.holds)))
            self._setup, self._all_parts = setup[0], None

    @property
    def _worker(self) -> Worker:
        if self._prepared is None:
            raise UnpreparedError("This worker was started again.")
        return self._prepared

    @property
    def _device(self) -> torch.device:
        return self._worker.setup.settings.device

    # Clients that don't wait

    def whole_round(
        self, t: int, id: int, server: ActorHandle | None, common: Common, mail: Mapping[str, Tensors], state: Tensors
    ) -> tuple[Update | ClientError, Tensors | None]:
        """Play a client's round. Its uploads go to the S-server while it runs."""
        self._all_parts = None
        line = Line(server, t, id)
        delivery = self._delivery(common, {id: mail} if mail else {})
        outcome = self._worker.whole_round(t, id, self._own(state), delivery, line.send)
        line.close()
        return _apart(outcome)

    # Clients that wait

    def begin(self, t: int, ids: Sequence[int], common: Common, mail: Mapping[int, Any], *states: Tensors) -> None:
        """Prepare the rounds of these clients."""
        self._all_parts = None
        delivery = self._delivery(common, mail)
        self._conversations = {
            id: self._worker.converse(t, id, self._own(state), delivery) for id, state in zip(ids, states, strict=True)
        }
        self._outcomes = {}

    def advance(self, replies: Replies) -> tuple[dict[int, ClientError | None], Uploads]:
        """Run each of these clients to its next upload. Returns the clients that ended, and the others' uploads."""
        self._check_begun(replies, self._conversations)
        said = {id: self._conversations[id](reply) for id, reply in to_device(replies, self._device).items()}
        ended = {id: word for id, word in said.items() if not isinstance(word, Message)}
        self._outcomes |= ended
        failures = {id: word if isinstance(word, ClientError) else None for id, word in ended.items()}
        return failures, {id: word for id, word in said.items() if isinstance(word, Message)}

    def outcome(self, id: int) -> tuple[Update | ClientError, Tensors | None]:
        """How a client's round ended."""
        self._check_begun([id], self._outcomes)
        return _apart(self._outcomes.pop(id))

    def _check_begun(self, clients: Iterable[int], here: Mapping[int, Any]) -> None:
        """Refuse clients whose rounds a process before this one began: a pool may have prepared this one since."""
        if lost := [id for id in clients if id not in here]:
            raise UnpreparedError(f"This worker was started again, and the rounds of the clients {lost} were lost.")

    def call(self, job: Job, shared: Any, item: Any) -> Any:
        """Any job, with the modules of all parts."""
        settings = self._worker.setup.settings
        shared, item = to_device((shared, item), self._device)
        if self._all_parts is None:
            self._all_parts = Workbench(_on(self._device, ray.get(self._setup).modules))
        return job(self._all_parts, settings, shared, item)

    def _delivery(self, common: Common, mail: Mapping[int, Any]) -> Delivery:
        received, extra, renewed, measured = common
        received, extra, mail = to_device((received, extra, mail), self._device)
        return Delivery(received, mail, extra, renewed, measured)

    def _own(self, state: Tensors) -> Tensors:
        # Tensors from the object store are shared, and a client's optimizer changes its state in place: copy it.
        return copied(to_device(state, self._device))


def _apart(outcome: Outcome | ClientError) -> tuple[Update | ClientError, Tensors | None]:
    """An outcome as two objects of the store: the update is for the driver, the state for the next worker."""
    return (outcome.update, outcome.state) if isinstance(outcome, Outcome) else (outcome, None)


class Line:
    """A client's line to the S-server. It does not wait for answers, only until the upload before has arrived."""

    def __init__(self, server: ActorHandle | None, t: int, client: int) -> None:
        self._server = server
        self._key = (t, client)
        self._last: ray.ObjectRef | None = None

    def send(self, upload: Message) -> None:
        """Send one upload. Uploads arrive in order, because each waits until the one before has arrived."""
        assert self._server is not None, "an algorithm without an S-server must not upload"
        self._wait()
        self._last = self._server.take.options(concurrency_group="intake").remote(*self._key, upload)

    def close(self) -> None:
        """Tell the S-server that no more uploads will come."""
        if self._server is not None:
            self._wait()
            self._last = self._server.close.options(concurrency_group="intake").remote(*self._key)
            self._wait()

    def _wait(self) -> None:
        try:
            if self._last is not None:
                ray.get(self._last)
        except LOSSES as error:
            raise LostError(f"The S-server was lost: {error}") from None


class ServerActor:
    """The S-server in a process of its own, with one thread that learns and one that takes uploads in."""

    def prepare(self, setup: Setup, reference: list[ray.ObjectRef], workers: Sequence[ActorHandle]) -> None:
        """To be called first in a run. It keeps x_s, and the auxiliaries that it aligns.

        The client part is elsewhere, but where clients have cuts of their own: there x_s has layers of it too.
        """
        held = ("server", "auxiliary", "client") if setup.cuts else ("server", "auxiliary")
        setup = settle(setup.only(held))
        self._pool = Pool(workers, reference[0])
        self._here = Workbench(setup.modules)
        self._setup = setup
        self._side = HostedServer.training(setup, self._spread)
        self._device = setup.settings.device
        self._config = setup.settings.config
        self._intake = Intake("interleaved", [], 0)
        self._link = Link(Ledger())
        self._before: tuple[Tensors, list[Loss]] = {}, []

    @property
    def _role(self) -> SServer:
        assert isinstance(self._side.role, SServer)
        return self._side.role

    def _spread(self, job: Job, shared: Any, items: Sequence[Any]) -> list[Any]:
        """Give the items to the workers. A single item is done here, because sending its data would gain nothing."""
        if len(items) > 1:
            return self._pool.spread(job, shared, items)
        return [job(self._here, self._setup.settings, shared, item) for item in items]

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the S-server by name."""
        torch.set_num_threads(self._config.threads)
        return getattr(self._side, method)(*to_device(arguments, self._device), **options)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. It is copied, because training changes it in place."""
        self._side.load_state(copied(to_device(state, self._device)))

    # Clients that don't wait

    def open(self, t: int, clients: Sequence[int]) -> None:
        """Expect uploads of these clients in round t."""
        self._side.begin(t)
        self._intake = Intake(self._config.order, clients, self._config.ray_spill_mib * MIB)

    def learn(self) -> list[Entry]:
        """Learn from all uploads of the round in order. Returns the bill."""
        torch.set_num_threads(self._config.threads)
        link = Link(Ledger())
        for uploads in self._intake:
            self._side.exchange(to_device(uploads, self._device), link)
        return link.ledger.entries(self._role.round)

    def take(self, t: int, client: int, upload: Message) -> None:
        """Take in an upload."""
        if t == self._role.round:
            self._intake.put(client, upload)

    def close(self, t: int, client: int) -> None:
        """Note that a client of the round has no more uploads."""
        if t == self._role.round:
            self._intake.close(client)

    # Clients that wait

    def begin(self, t: int) -> None:
        """Start a round. The S-server's current state is kept, because the round may have to start again."""
        self._side.begin(t)
        self._before = copied(self._side.state()), list(self._role.losses)
        self._link = Link(Ledger())

    def begin_again(self, t: int) -> None:
        """Start the round again from the state that `begin` kept."""
        state, losses = self._before
        self._side.load_state(state)
        self._role.losses += losses
        self.begin(t)

    def exchange(self, clients: Sequence[int], *shares: Uploads) -> tuple[Any, ...]:
        """Take the uploads of one step, by worker. Returns a sign that all went well, then the replies by worker."""
        torch.set_num_threads(self._config.threads)
        uploads = {id: upload for share in shares for id, upload in share.items()}
        ordered = {id: uploads[id] for id in clients if id in uploads}
        replies = self._side.exchange(to_device(ordered, self._device), self._link)
        return True, *({id: replies[id] for id in share} for share in shares)

    def end(self) -> list[Entry]:
        """End the round; returns its bill."""
        self._before = {}, []
        return self._link.ledger.entries(self._role.round)


def settle(setup: Setup) -> Setup:
    """Prepare this process for the run: set torch's threads, and put everything on its own device."""
    carry_tensors_as_arrays()
    config = setup.settings.config
    # Ray shows a process only its own GPUs, numbered from 0.
    given = bool(ray.get_gpu_ids())
    device = pick_device(config.device.split(":")[0] if given or config.device != "auto" else "cpu")
    prepare_process(config.threads, device)
    task = copy.copy(setup.settings.task)
    task.device = device
    modules = _on(device, setup.modules)
    at_cut = {cut: _on(device, parts) for cut, parts in setup.at_cut.items()}
    settings = replace(setup.settings, device=device, task=task)
    initial = to_device(setup.initial, device)
    return replace(setup, settings=settings, modules=modules, initial=initial, at_cut=at_cut)


def _on(device: torch.device, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {part: module.to(device) for part, module in modules.items()}

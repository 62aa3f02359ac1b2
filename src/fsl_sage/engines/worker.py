"""A worker: one copy of the modules that serves many clients, in a thread or in a process of its own."""

import math
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsl_sage.activity import now
from fsl_sage.engines.base import (
    REMEDY,
    ClientError,
    Delivery,
    Outcome,
    Setup,
    advance,
    begun,
    coded_update,
    opened,
    sent_along,
    take_optimizers,
)
from fsl_sage.errors import InputError, TrainingError, described
from fsl_sage.precision import all_finite
from fsl_sage.roles.client import Client
from fsl_sage.roles.group import Group, uploads_of
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.server_jobs import SpreadOver
from fsl_sage.roles.work import Chain, Settings, Workbench, boundary, mean_loss
from fsl_sage.wire.codecs import CodecError
from fsl_sage.wire.ends import ClientEnd
from fsl_sage.wire.message import PAUSE, Message, Tensors
from fsl_sage.wire.paths import below, flat

Result = TypeVar("Result")

Place = Callable[[int], Tensor | None]
"""Gives so many bytes of memory, or None where what is to move there may stay."""

Conversation = Callable[[Message | None], Message | Outcome | ClientError]
"""A client's round. Called with the reply to its last upload, it returns the next one, and at the end the outcome."""


class Worker:
    """Runs the rounds of clients, each made from its state and the weights that came down."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.workbench = Workbench(setup.modules)
        self._at_cut = {cut: Workbench({"client": parts["client"]}) for cut, parts in setup.at_cut.items()}

    def converse(
        self, t: int, id: int, state: Mapping[str, Tensor], delivery: Delivery, rests: Place | None = None
    ) -> Conversation:
        """A client's round, ready to start. An exception in its code becomes its outcome.

        With `rests` it says PAUSE between its steps, and is then to be called with None; from the first pause on, what
        it holds is in the memory that this gives, if it gives some.
        """
        conversation = self._conversation(t, id, state, delivery, rests)

        def proceed(reply: Message | None) -> Message | Outcome | ClientError:
            return _or_failure(id, t, lambda: _next_word(conversation, reply))

        return proceed

    def whole_round(
        self, t: int, id: int, state: Mapping[str, Tensor], delivery: Delivery, send: Callable[[Message], None]
    ) -> Outcome | ClientError:
        """Play the round of a client that waits for no replies; `send` is called with every upload."""
        conversation = self.converse(t, id, state, delivery)
        while isinstance(said := conversation(None), Message):
            send(said)
        return said

    def rounds_as_one(
        self,
        t: int,
        states: Mapping[int, Mapping[str, Tensor]],
        delivery: Delivery,
        send: Callable[[int, Message], None],
    ) -> dict[int, Outcome | ClientError]:
        """Play the rounds of clients that wait for no replies together, as a group.

        Args:
            t: The round.
            states: By client of the group, its state.
            delivery: What the clients get.
            send: Called with a client and an upload of it, for every upload.
        """
        first = next(iter(states))
        said = _or_failure(first, t, lambda: self._play_as_one(t, states, delivery, send))
        if isinstance(said, ClientError):
            together = f"{said.reason} (clients {', '.join(map(str, states))} train as one)"
            return dict.fromkeys(states, said.with_reason(together))
        return {
            client.id: _or_failure(client.id, t, partial(self._outcome, t, client, end, delivery))
            for client, end in said
        }

    def rehearse_as_one(self) -> None:
        """Take a first step of a group of two clients and forget it; an exception says why no group is possible."""
        client = partial(self._client, 0, 0, {}, Delivery(self.setup.initial, {}))
        group = Group([client(), client()], self.setup.settings)
        batch = next(group.batches(0))
        z = group.forward(batch)
        behind = group.auxiliary_gradient if "auxiliary" in self.setup.algorithm.holds else group.server_gradient
        group.backward(z, behind(z, batch.target))
        group.step()

    def _play_as_one(
        self,
        t: int,
        states: Mapping[int, Mapping[str, Tensor]],
        delivery: Delivery,
        send: Callable[[int, Message], None],
    ) -> list[tuple[Client, ClientEnd]]:
        """The local steps of a group. Returns its clients as they are afterwards, and their ends of the wire."""
        clients = [self._client(t, id, state, delivery) for id, state in states.items()]
        ends = [self._end(t, client, states[client.id]) for client in clients]
        for client in clients:
            take_optimizers(self.setup.algorithm, client, t)
        group = Group(clients, self.setup.settings)
        local_round = opened(self.setup.algorithm, group, t)
        while (upload := advance(local_round, None)) is not None:
            for client, end, own in zip(clients, ends, uploads_of(upload, len(clients)), strict=True):
                send(client.id, end.send(_numbered(own, client), client.places))
        group.hand_back()
        return list(zip(clients, ends, strict=True))

    def _conversation(
        self, t: int, id: int, state: Mapping[str, Tensor], delivery: Delivery, rests: Place | None
    ) -> Generator[Message, Message | None, Outcome]:
        client = self._client(t, id, state, delivery)
        end = self._end(t, client, state)
        del state  # so that what moves away is freed
        awake = True
        local_round = begun(self.setup.algorithm, client, t)
        reply: Message | None = None
        last_upload = -1
        while True:
            with client.meter.watching() if delivery.measured == id else nullcontext():
                upload = advance(local_round, reply, pauses=rests is not None)
            if upload is None:
                break
            if upload is PAUSE:
                reply = None
                if awake and rests is not None:
                    client.rest(rests)
                    awake = False
                yield PAUSE
                continue
            if client.step_index == last_upload and not self.setup.algorithm.waits_in(t):
                raise InputError(
                    f"{self.setup.settings.config.algorithm} uploads twice in one local step, and its clients do not "
                    "wait: let one Message carry both, or set waits = True."
                )
            last_upload = client.step_index
            reply = end.receive((yield end.send(_numbered(upload, client), client.places)))
        return self._outcome(t, client, end, delivery)

    def _outcome(self, t: int, client: Client, end: ClientEnd, delivery: Delivery) -> Outcome:
        """What a client's round leaves: its update as it travels, and its state."""
        averaged = self.setup.algorithm.averaged_in(t)
        losses = {"client_loss": mean_loss(client.losses)} if client.losses else {}
        extra = sent_along(self.setup, client, t)
        update = Update(client.id, client.upload(averaged), losses, extra, footprint=client.footprint())
        check_finite(update)
        update = coded_update(self.setup, end, update, delivery.received)
        return Outcome(update, client.state(averaged) | flat({"codec": end.state()}))

    def _end(self, t: int, client: Client, state: Mapping[str, Tensor]) -> ClientEnd:
        return ClientEnd(self.setup.settings.codecs, client.id, t, below("codec/", state), len(client.examples))

    def _client(self, t: int, id: int, state: Mapping[str, Tensor], delivery: Delivery) -> Client:
        setup = self.setup
        workbench = self._at_cut[setup.cuts[id]] if setup.cuts else self.workbench
        client = Client(
            id,
            setup.examples[id],
            setup.settings,
            workbench,
            received=delivery.received,
            initial={part: workbench.slots[part].only(setup.initial[part]) for part in setup.algorithm.holds},
            state=self._without_older(state, delivery.received) if id in delivery.renewed else state,
            trains=setup.algorithm.trained_in(t),
            received_extra=delivery.extra,
            averaged=setup.algorithm.averaged,
        )
        if id in delivery.mail:
            setup.algorithm.on_download(client, Message(delivery.mail[id]))
        return client

    def _without_older(self, state: Mapping[str, Tensor], received: Parts) -> Tensors:
        """A client's state without its own weights of those parts whose newest average it gets now."""
        older = {f"own/{part}/{name}" for part in self.setup.algorithm.averaged for name in received.get(part, {})}
        return {path: tensor for path, tensor in state.items() if path not in older}


def _next_word(conversation: Generator[Message, Message | None, Outcome], reply: Message | None) -> Message | Outcome:
    """What a client says next; at the end of its round the outcome."""
    try:
        return conversation.send(reply)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


def _or_failure(id: int, t: int, call: Callable[[], Result]) -> Result | ClientError:
    """What a client's code gives in round t, or its failure."""
    try:
        return call()
    except (DivergedError, CodecError, InputError) as error:
        return ClientError(id, t, str(error))
    except TrainingError:  # a full disk is no fault of the client's
        raise
    except Exception as error:
        failure = ClientError(id, t, described(error))
        failure.add_note("".join(traceback.format_exception(error)))
        return failure


def _numbered(upload: Message, client: Client) -> Message:
    """An upload with the number of its local step, which sets the S-server's learning rate."""
    return replace(upload, values={**upload.values, "step": client.step_index})


class DivergedError(Exception):
    """A client's numbers are not finite and must not be used."""


def check_finite(update: Update) -> None:
    """Refuse an update with NaN or infinities. It must not reach an average or a checkpoint."""
    for name, loss in update.losses.items():
        if not math.isfinite(loss):
            raise DivergedError(f"its {name.replace('_', ' ')} became {loss}. {REMEDY}")
    for path, tensor in flat({**update.parts, **update.extra}).items():
        if not all_finite(tensor):
            raise DivergedError(f"'{path}' became infinite or NaN. {REMEDY}")


def evaluate(settings: Settings, parts: Parts, spread: SpreadOver) -> dict[str, Any]:
    """Metrics of the merged model: the test set's batches are shared out among the workers and summed in order."""
    scores = spread(_score, parts, range(settings.task.test_batches()))
    return settings.task.summarise({name: sum(part[name] for part in scores) for name in scores[0]})


@torch.no_grad()
def _score(workbench: Workbench, settings: Settings, parts: Parts, index: int) -> dict[str, Any]:
    order = [part for part in ("client", "server", "head") if part in parts]
    client, *others = (Replica(workbench.slots[part], parts[part], None).module().eval() for part in order)
    now(f"evaluating, batch {index + 1} of {settings.task.test_batches()}")
    batch = settings.task.test_batch(index)
    with settings.passes.autocast():
        z = client(**batch.inputs) if isinstance(batch.inputs, Mapping) else client(batch.inputs)
        output = settings.task.output(Chain(*others), boundary(z), batch.target)
    return settings.task.score(output, batch.target)


def copied(tensors: Mapping[str, Any]) -> Tensors:
    """Copies of these tensors, which may be changed."""
    return {name: tensor.clone() for name, tensor in tensors.items()}

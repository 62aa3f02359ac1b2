"""A worker: one copy of the modules that serves many clients, in a thread or in a process of its own."""

import math
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

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
    sent_along,
)
from fsl_sage.errors import InputError, TrainingError, described
from fsl_sage.precision import all_finite
from fsl_sage.roles.client import Client
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.server_jobs import SpreadOver
from fsl_sage.roles.work import Chain, Settings, Workbench, boundary, mean_loss
from fsl_sage.wire.codecs import CodecError
from fsl_sage.wire.ends import ClientEnd
from fsl_sage.wire.message import PAUSE, Message, Tensors
from fsl_sage.wire.paths import below, flat

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
            try:
                return conversation.send(reply)
            except StopIteration as end:
                return end.value
            except (DivergedError, CodecError, InputError) as error:
                return ClientError(id, t, str(error))
            except TrainingError:  # a full disk is no fault of the client's
                raise
            except Exception as error:
                failure = ClientError(id, t, described(error))
                failure.add_note("".join(traceback.format_exception(error)))
                return failure

        return proceed

    def whole_round(
        self, t: int, id: int, state: Mapping[str, Tensor], delivery: Delivery, send: Callable[[Message], None]
    ) -> Outcome | ClientError:
        """Play the round of a client that waits for no replies; `send` is called with every upload."""
        conversation = self.converse(t, id, state, delivery)
        while isinstance(said := conversation(None), Message):
            send(said)
        return said

    def _conversation(
        self, t: int, id: int, state: Mapping[str, Tensor], delivery: Delivery, rests: Place | None
    ) -> Generator[Message, Message | None, Outcome]:
        client = self._client(t, id, state, delivery)
        end = ClientEnd(self.setup.settings.codecs, id, t, below("codec/", state), len(client.examples))
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
            # An upload has the number of its local step, which sets the S-server's learning rate.
            if client.step_index == last_upload and not self.setup.algorithm.waits_in(t):
                raise InputError(
                    f"{self.setup.settings.config.algorithm} uploads twice in one local step, and its clients do not "
                    "wait: let one Message carry both, or set waits = True."
                )
            last_upload = client.step_index
            upload = replace(upload, values={**upload.values, "step": client.step_index})
            sent = yield end.send(upload, client.places)
            reply = end.receive(sent)
        averaged = self.setup.algorithm.averaged_in(t)
        losses = {"client_loss": mean_loss(client.losses)} if client.losses else {}
        update = Update(
            id, client.upload(averaged), losses, sent_along(self.setup, client, t), footprint=client.footprint()
        )
        check_finite(update)
        update = coded_update(self.setup, end, update, delivery.received)
        return Outcome(update, client.state(averaged) | flat({"codec": end.state()}))

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

"""What the two SplitFed systems (Thapa et al., 2022) have in common: clients wait for the true cut gradients."""

from collections.abc import Iterator
from typing import ClassVar

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.problems.base import Batch
from fsl_sage.roles.protocols import ClientRole, SServerRole
from fsl_sage.wire.message import CUT_GRADIENTS, PAUSE, CutGradients, Message, Smashed


class SplitFed(Algorithm):
    """Every local step is a step of the whole model, split over client and S-server.

    In a U-shape a step has two exchanges: activations up and down, then gradients up and down; labels stay.
    """

    uses: ClassVar[tuple[str, ...]] = ("optimizer.server_lr",)
    waits = True
    averaged: tuple[str, ...] = ("client",)
    holds: tuple[str, ...] = ("client",)
    takes_two_cuts = True
    own_copy: bool
    """Whether each client has a server-side model of its own."""

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """Every batch goes up, and its cut gradients come down."""
        for batch in self.batches(client, t):
            z = client.forward(batch)
            if self.labels_stay:
                features = yield Smashed(z, {})
                assert features is not None
                reply = yield CutGradients(client.head_gradient(features.smashed, batch.target))
            else:
                reply = yield Smashed(z, batch.target)
            assert reply is not None
            client.backward(z, reply.cut_gradients)
            client.step()
            del batch, z, reply  # and with them the graph, while others take their steps
            yield PAUSE

    @property
    def answers_one_by_one(self) -> bool:
        """Yes, unless there are joint steps. In a U-shape a step has two exchanges; another round may not pause."""
        return self._pauses and type(self).on_uploads is Algorithm.on_uploads

    @property
    def _pauses(self) -> bool:
        return type(self).local_round is SplitFed.local_round and not self.labels_stay

    def batches(self, client: ClientRole, t: int) -> Iterator[Batch]:
        """The batches that a client takes now: all of its round."""
        return client.batches(t)

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> Message:
        """Learn and answer with the cut gradients; in a U-shape first with what the head needs."""
        if CUT_GRADIENTS in upload.parts:
            return CutGradients(server.backward(client, upload))
        if self.labels_stay:
            return Smashed(server.forward(client, upload, own_copy=self.own_copy), {})
        return CutGradients(server.learn(client, upload, cut_gradient=True, own_copy=self.own_copy))

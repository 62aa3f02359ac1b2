"""FedGKT (He et al., 2020): small models at the clients and a large one at the server teach each other by logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsl_sage.algorithms.base import Algorithm, LocalRound
from fsl_sage.config import FROM_ZERO, RATE, WHOLE, Config, check_ranges
from fsl_sage.errors import InputError
from fsl_sage.problems.batches import batch_indices
from fsl_sage.problems.classification import raw_logits_of
from fsl_sage.problems.make import are_texts
from fsl_sage.roles.protocols import ClientRole, SServerRole
from fsl_sage.seeding import generator
from fsl_sage.wire.message import LOGITS, Message, Smashed


@dataclass(frozen=True)
class FedGKTOptions:
    """What can be chosen; the clients' epochs are --local-epochs."""

    server_epochs: int = field(default=1, metadata={"unit": "epochs"})
    """Epochs that the S-server takes over the features of a round."""
    temperature: float = 3.0
    """The temperature T of the softmax in both KL divergences, which are multiplied by its square."""
    client_kl: float = 1.0
    """Weight of the KL divergence from the server's logits in the clients' loss, besides the cross entropy; 0: none."""
    server_kl: float = 1.0
    """Weight of the KL divergence from the clients' logits in the S-server's loss; 0: none."""
    server_ce: float = 1.0
    """Weight of the cross entropy in the S-server's loss."""

    def __post_init__(self) -> None:
        weights = dict.fromkeys(("client_kl", "server_kl", "server_ce"), FROM_ZERO)
        check_ranges(self, {"server_epochs": WHOLE, "temperature": RATE, **weights})
        if self.server_kl == self.server_ce == 0:
            raise InputError("--server-kl 0 and --server-ce 0 leave the S-server nothing to learn: give one above 0.")


class FedGKT(Algorithm):
    """Each client has a part and a head (its auxiliary) of its own. Features and logits travel, never weights."""

    title = "FedGKT"
    colour = "#0F5257"
    without_averaging = dict.fromkeys(
        ("rule", "optimizer", "lr", "momentum", "proximal", "control_variates"), "it averages no weights"
    )
    Options = FedGKTOptions
    options: FedGKTOptions
    uses = ("model.auxiliary", "optimizer.auxiliary_weight_decay", "optimizer.server_lr")
    one_cut_because = "its S-server learns from features of one shape"
    own_optimizers_because = "it averages no weights"
    waits = False
    averaged = ()
    own_parts = ("client", "auxiliary")
    holds = ("client", "auxiliary")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if are_texts(config):
            raise InputError(
                "fedgkt cannot run on texts: its logits are one vector for each example, not one for each token. "
                "Give another --algorithm."
            )

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """Local steps; then features, logits and labels of the whole training set, in evaluation mode."""
        taught = client.extra.pop("logits", None)  # [n, C], by place among the client's examples
        order = client.examples.argsort() if taught is not None else None
        for batch in client.batches(t):
            output = client.output("auxiliary", *client.forward(batch))
            loss = client.task_loss(output, batch.target)
            if taught is not None and order is not None and self.options.client_kl:
                assert batch.examples is not None
                places = order[torch.searchsorted(client.examples[order], batch.examples)]
                loss = loss + self.options.client_kl * self._divergence(output, taught[places.to(taught.device)])
            client.minimise(loss)
        for batch in client.own_examples():
            z, output = client.infer(batch, "auxiliary")
            upload = Smashed(z, batch.target)
            yield Message({**upload.parts, LOGITS: {"logits": _logits(output)}})

    def on_upload(self, server: SServerRole, client: int, upload: Message) -> None:
        """The S-server learns when it has the features of all."""
        server.keep(client, upload)

    def end_of_round(self, server: SServerRole, t: int) -> Iterator[tuple[int, Message]]:
        """Some epochs over the round's features; then the server's logits of each example go to its client."""
        kept = server.take_kept()
        if kept:
            self._learn(server, t, [upload for uploads in kept.values() for upload in uploads])
        for client, uploads in kept.items():
            logits = torch.cat([_logits(server.infer(*upload.smashed)) for upload in uploads])
            yield client, Message({LOGITS: {"logits": logits}})

    def on_download(self, client: ClientRole, message: Message) -> None:
        """The server's logits, of the last round in which this client was there."""
        client.extra["logits"] = message.parts[LOGITS]["logits"]

    def _learn(self, server: SServerRole, t: int, uploads: Sequence[Message]) -> None:
        z = [torch.cat(tensors) for tensors in zip(*(upload.smashed for upload in uploads), strict=True)]
        target = {name: torch.cat([upload.target[name] for upload in uploads]) for name in uploads[0].target}
        taught = torch.cat([upload.parts[LOGITS]["logits"] for upload in uploads])
        batches = [
            indices.to(taught.device)
            for epoch in range(self.options.server_epochs)
            for indices in batch_indices(
                len(taught), self.config.batch_size, generator(self.config.seed, "server order", round=t, step=epoch)
            )
        ]
        if taught.is_meta:  # a dry run: the shapes of the first step say all
            batches = batches[:1]
        for number, chosen in enumerate(batches):
            output = server.output(*(tensor[chosen] for tensor in z))
            loss = self.options.server_ce * server.task_loss(output, {name: x[chosen] for name, x in target.items()})
            if self.options.server_kl:
                loss = loss + self.options.server_kl * self._divergence(output, taught[chosen])
            server.minimise(loss, number / len(batches))

    def _divergence(self, output: Any, taught: Tensor) -> Tensor:
        """T^2 KL(softmax(taught / T) || softmax(output / T)), the mean over the batch."""
        temperature = self.options.temperature
        student, teacher = (F.log_softmax(logits / temperature, dim=1) for logits in (_logits(output), taught))
        return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def _logits(output: Any) -> Tensor:
    """A model's output [B, C]."""
    logits = raw_logits_of(output)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise InputError(f"fedgkt needs logits of at least 2 classes for each example, not {list(logits.shape)}.")
    return logits

"""LocFedMix-SL (Oh et al., 2022): joint steps, mixed activations at the S-server, decoders at the clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from fsl_sage.algorithms.base import LocalRound
from fsl_sage.algorithms.joint import JointSplitFed, local_step_of, refuse_other_orders
from fsl_sage.config import RATE, WHOLE, Config, check_ranges
from fsl_sage.errors import InputError
from fsl_sage.problems.make import are_texts
from fsl_sage.roles.protocols import ClientRole, SServerRole
from fsl_sage.seeding import numpy_generator
from fsl_sage.wire.message import CutGradients, Message, Smashed


@dataclass(frozen=True)
class LocFedMixSLOptions:
    """What can be chosen."""

    partners: int = 1
    """How many other clients' activations the S-server mixes with a client's in each step, n_s; 0: none."""
    mix_alpha: float = 1.0
    """The share of a client's own activations in a mixture is drawn from Beta(alpha, alpha)."""
    decoder: bool = True
    """Whether clients also learn to reconstruct their inputs from what they send, by a decoder."""
    decoder_lr: float = 1e-3
    """The learning rate of the decoder."""
    average_every: int = field(default=1, metadata={"label": "averaging interval", "unit": "rounds"})
    """Average client parts and decoders every T_c rounds; in between each client goes on with its own."""

    def __post_init__(self) -> None:
        partners = ("a whole number from 0 up", 0, 2**62)
        check_ranges(self, {"partners": partners, "mix_alpha": RATE, "decoder_lr": RATE, "average_every": WHOLE})


class LocFedMixSL(JointSplitFed):
    """SplitFed with joint steps, whose server also learns from mixtures, and whose clients from reconstruction."""

    title = "LocFedMix-SL"
    colour = "#B05FD0"
    own_optimizers_because = "its clients may go several rounds without an average"
    without_averaging = dict.fromkeys(("control_variates",), "its clients may go several rounds without an average")
    Options = LocFedMixSLOptions
    options: LocFedMixSLOptions
    uses = ("optimizer.auxiliary_weight_decay", "optimizer.server_lr")
    takes_two_cuts = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        refuse_other_orders(config, "locfedmix-sl")
        if are_texts(config):
            raise InputError(
                "locfedmix-sl cannot run on texts: activations of texts of different lengths cannot be mixed, and "
                "tokens have no decoder. Give another --algorithm."
            )
        self.average_every = self.options.average_every
        if self.options.decoder:
            self.averaged = self.holds = ("client", "decoder")

    def local_round(self, client: ClientRole, t: int) -> LocalRound:
        """x_c steps on g + dR/ds, and the decoder h on R = |x - h(s)|^2."""
        for batch in client.batches(t):
            s = client.forward(batch)
            reply = yield Smashed(s, batch.target)
            assert reply is not None
            gradient = reply.cut_gradients
            if self.options.decoder:
                (local,) = client.gradient("decoder", s, partial(F.mse_loss, target=batch.inputs))
                gradient = (gradient[0] + local,)
            client.backward(s, gradient)
            client.step(decoder=self.options.decoder_lr)

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """One step on the sum of delta_i (L_i + mean of i's mixed losses); the reply is dL_i/ds_i alone."""
        whole = sum(server.client_weights[client] for client in uploads)
        shares = {client: server.client_weights[client] / whole for client in uploads}  # delta_i
        replies: dict[int, Message | None] = {
            client: CutGradients(server.join(client, upload, shares[client])) for client, upload in uploads.items()
        }
        step = local_step_of(uploads)
        for client, upload in uploads.items():
            partners = self._partners(client, list(uploads), server.round, step)
            for partner, own_share in partners:
                loss = mixed_loss(server, own_share, upload, uploads[partner])
                server.join_loss(loss * (shares[client] / len(partners)))
        server.step(step)
        return replies

    def _partners(self, client: int, present: list[int], t: int, step: int) -> list[tuple[int, float]]:
        """The clients whose activations are mixed with this one's in a step, and this one's share lambda."""
        others = [other for other in present if other != client]
        draw = numpy_generator(self.config.seed, "mixing", client, t, step)
        drawn = draw.permutation(others)[: self.options.partners].tolist()
        return [(int(other), float(draw.beta(self.options.mix_alpha, self.options.mix_alpha))) for other in drawn]


def mixed_loss(server: SServerRole, own_share: float, one: Message, other: Message) -> Tensor:
    """L~ of lambda s_i + (1 - lambda) s_j, the first samples of both where one has more; its labels are mixed too.

    The pass leaves the running statistics alone, which are for activations that are not mixed.
    """
    size = min(len(upload.smashed[0]) for upload in (one, other))
    pairs = zip(one.smashed, other.smashed, strict=True)
    output = server.output(
        *(own_share * s[:size] + (1 - own_share) * other_s[:size] for s, other_s in pairs), leaves_trace=False
    )
    losses = [
        server.task_loss(output, {name: tensor[:size] for name, tensor in upload.target.items()}, counts=False)
        for upload in (one, other)
    ]
    return own_share * losses[0] + (1 - own_share) * losses[1]

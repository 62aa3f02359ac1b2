"""CPSL, cluster-based parallel split learning (Wu et al., 2023)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fsl_sage.algorithms.joint import local_step_of, refuse_other_orders
from fsl_sage.algorithms.relay import Relay, RelayOptions
from fsl_sage.alignment.dataset import Upload, together
from fsl_sage.config import WHOLE, Config, check_ranges
from fsl_sage.roles.protocols import SServerRole
from fsl_sage.seeding import numpy_generator
from fsl_sage.wire.message import CutGradients, Message, Smashed


@dataclass(frozen=True)
class CPSLOptions(RelayOptions):
    """What can be chosen."""

    cluster_size: int = field(default=2, metadata={"unit": "clients"})
    """Clients in a cluster; the last one of a round has those that are left."""
    draw_clusters: bool = False
    """Draw the clusters and their order anew in every round; else they are made in the order of the clients."""
    own_reply: bool = False
    """Reply with the gradient of a member's own mean loss, as with joint steps; else, as in the paper, with its slice
    of the gradient of the cluster's mean loss."""

    def __post_init__(self) -> None:
        check_ranges(self, {"cluster_size": WHOLE})


class CPSL(Relay):
    """Clusters take turns. In a cluster the S-server takes one step on all members' batches, put together."""

    title = "CPSL"
    colour = "#2F6B2F"
    Options = CPSLOptions
    options: CPSLOptions
    takes_two_cuts = False  # the S-server computes the loss of the whole cluster

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        refuse_other_orders(config, "cpsl")

    def turns(self, t: int, cohort: Sequence[int], steps: Mapping[int, int]) -> list[Sequence[int]]:
        """The clusters of the round, members in ascending order."""
        size = self.options.cluster_size
        order = list(cohort)
        if self.options.draw_clusters:
            order = numpy_generator(self.config.seed, "clusters", round=t).permutation(order).tolist()
        return [sorted(order[start : start + size]) for start in range(0, len(order), size)]

    def on_uploads(self, server: SServerRole, uploads: Mapping[int, Message]) -> dict[int, Message | None]:
        """One step on the concatenation; each member gets its slice of the gradient."""
        whole = together([Upload(upload.smashed, dict(upload.target)) for upload in uploads.values()])
        cluster = Message(Smashed(*whole).parts, {"step": local_step_of(uploads)})
        gradients = server.learn(min(uploads), cluster, cut_gradient=True)
        replies: dict[int, Message | None] = {}
        start = 0
        for client, upload in uploads.items():
            scale = server.terms(cluster) / server.terms(upload) if self.options.own_reply else 1.0
            replies[client] = CutGradients(_slices(gradients, upload, start, scale))
            start += len(upload.smashed[0])
        return replies


def _slices(gradients: Sequence[Tensor], upload: Message, start: int, scale: float) -> list[Tensor]:
    """Of the cluster's gradients those of one upload, without what it was filled up with."""
    floating = [z for z in upload.smashed if z.is_floating_point()]
    places = [(slice(start, start + len(z)), *map(slice, z.shape[1:])) for z in floating]
    slices = [gradient[place] for gradient, place in zip(gradients, places, strict=True)]
    return slices if scale == 1 else [scale * own for own in slices]

"""Split learning, one client after the other (Gupta and Raskar, 2018; Vepakomma et al., 2018)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fsl_sage.algorithms.relay import Relay, RelayOptions
from fsl_sage.errors import InputError
from fsl_sage.problems.base import Batch
from fsl_sage.roles.protocols import ClientRole


@dataclass(frozen=True)
class SLOptions(RelayOptions):
    """What can be chosen."""

    alternate: bool = False
    """Alternate mini-batches (Gawali et al., 2020): a turn is one batch of a client, and not all batches of its
    round."""


class SL(Relay):
    """Each client takes its local steps as in SplitFed and hands x_c on to the next. Nothing is averaged."""

    title = "SL"
    colour = "#6A3D9A"
    Options = SLOptions
    options: SLOptions

    def check(self) -> None:
        """Refuse a new optimizer in every turn of one batch."""
        super().check()
        if self.options.alternate and self.config.client_optimizer == "reset":
            raise InputError(
                "--client-optimizer reset cannot run with --alternate: a client has many turns in a round, and would "
                "start each batch with a new optimizer. Give --client-optimizer keep."
            )

    def turns(self, t: int, cohort: Sequence[int], steps: Mapping[int, int]) -> list[Sequence[int]]:
        """Every client once; with --alternate once for each of its batches, step k of all before step k + 1 of any."""
        if not self.options.alternate:
            return [[client] for client in cohort]
        return [[client] for k in range(max(steps.values())) for client in cohort if k < steps[client]]

    def batches(self, client: ClientRole, t: int) -> Iterator[Batch]:
        """All batches of the round; with --alternate the one after those that the client has taken in it."""
        if not self.options.alternate:
            return client.batches(t)
        last_round, count = client.extra.get("taken", torch.tensor([t, 0])).tolist()
        k = count if last_round == t else 0
        client.extra["taken"] = torch.tensor([t, k + 1])
        return client.batches(t, range(k, k + 1))

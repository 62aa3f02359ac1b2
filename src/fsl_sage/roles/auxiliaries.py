"""The auxiliaries as the S-server knows them, and what it aligns them by (Algorithm 3)."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fsl_sage.alignment.dataset import AlignmentData, SharedRoom, Upload, tokens_in
from fsl_sage.alignment.fidelity import CLIENTS, SAMPLES, Fidelity, mean
from fsl_sage.alignment.passes import Smash
from fsl_sage.alignment.regression import Sums
from fsl_sage.roles.server_jobs import POOLED, Aligned, Alignment, SpreadOver, align_one, fidelity_one, fit_one
from fsl_sage.roles.work import Settings, Workbench
from fsl_sage.seeding import numpy_generator
from fsl_sage.split import Ridge, random_features
from fsl_sage.wire.message import AUXILIARY, Message, Tensors
from fsl_sage.wire.paths import below, by_client, flat


class Auxiliaries:
    """One auxiliary for all clients (POOLED), or one for each; and the uploads that they are aligned by.

    The server-side model comes as an argument: an alignment reads it and changes nothing but auxiliaries.
    """

    def __init__(self, settings: Settings, workbench: Workbench, initial: Tensors, spread: SpreadOver) -> None:
        self.data: dict[int, AlignmentData] = {}
        """The alignment dataset of every client that has uploaded for it."""
        self.common = initial
        """That of every client that has none of its own: the initial one, the F-server's average, or a pooled one."""
        self._settings = settings
        self._options = settings.config.alignment
        self._workbench = workbench
        self._spread = spread
        self._pooled = self._options.scope == "pooled"
        self._fits = random_features(settings.config.model.auxiliary) is not None
        """Whether an alignment fits a ridge auxiliary by its sums, and trains none."""
        self._aligned: dict[int, Tensors] = {}
        self._optimizers: dict[int, Tensors] = {}
        self._aligned_in: dict[int, int] = {}
        """By client, or for POOLED, the last round that aligned its auxiliary."""
        self._seen: set[int] = set()
        """The clients whose newest upload an alignment has seen."""
        self._sums: dict[int, Sums] = {}
        """Of a ridge auxiliary: by client, or for POOLED, what all uploads have told."""
        self._uploads = 0
        """How many have come to alignment datasets that share their room."""
        self._room = self._common_room()
        self.forget_round()

    def forget_round(self) -> None:
        """A round begins."""
        self.aligned = False
        """Whether an auxiliary was aligned in this round."""
        self.skipped: dict[str, str] = {}
        """By client ("pooled" for the one of all), why an alignment of this round gave nothing."""

    def of(self, client: int) -> Tensors:
        """The auxiliary that a client uses, as far as the S-server knows; for POOLED, the common one."""
        return self._aligned.get(client, self.common)

    # What it is aligned by

    def remember(self, client: int, smashed: Message, gradients: Smash = ()) -> None:
        """Store an upload in the client's alignment dataset.

        For a ridge auxiliary z_b, per sample, is added to the sums, and of the upload only what measures fidelity is
        stored.
        """
        if self._fits and gradients:
            owner, ridge = POOLED if self._pooled else client, self._ridge()
            if owner not in self._sums:
                self._sums[owner] = Sums.nothing(ridge, self._settings.device)
            self._sums[owner].add(ridge, smashed.smashed, smashed.target, gradients[0], self._options.forgetting)
        data = self.data.setdefault(client, AlignmentData(self._capacity()))
        if self._room is None:
            data.add(smashed)
        else:
            self._room.add(client, smashed, self._uploads)
            self._uploads += 1
        self._seen.discard(client)

    def _ridge(self) -> Ridge:
        """The ridge auxiliary; its weights may be anybody's."""
        module = self._workbench.slots["auxiliary"].module
        assert isinstance(module, Ridge)
        return module

    def _capacity(self) -> int:
        """How many samples of a client are stored; as many as come where tokens are counted."""
        if self._fits:
            return min(SAMPLES, self._options.samples)
        return self._options.samples if self._options.tokens is None else 2**62

    def _common_room(self) -> SharedRoom | None:
        """The room that the datasets of all clients share; None if nothing bounds them together."""
        options, clients = self._options, self._settings.config.clients
        if self._fits:
            return None
        if options.tokens is not None:
            return SharedRoom(self.data, options.tokens, tokens_in)
        if clients * options.samples <= options.total_samples:
            return None
        return SharedRoom(self.data, options.total_samples, len)

    # Alignment

    def align(self, clients: Sequence[int], t: int, server: Tensors) -> Iterator[tuple[int, Message]]:
        """Align with the server in round t on these clients' uploads, and yield each auxiliary for its client.

        An alignment that gives nothing usable leaves the auxiliary as it was and is named in `skipped`.
        """
        if not clients:
            return
        owners = [POOLED] if self._pooled else clients
        if self._fits:
            results = self._spread(fit_one, None, [self._sums[owner] for owner in owners])
        else:
            items = [self._alignment(owner, clients) for owner in owners]
            results = self._spread(align_one, (t, server), items)
        self._seen |= set(clients)
        for owner, result in zip(owners, results, strict=True):
            yield from self._take_over(owner, t, result)

    def _alignment(self, owner: int, clients: Sequence[int]) -> Alignment:
        """An alignment on the owner's uploads, or on those of all these clients."""
        sources = clients if owner == POOLED else [owner]
        uploads: list[Upload] = [upload for client in sources for upload in self.data[client]]
        return Alignment(owner, self.of(owner), self._optimizers.get(owner, {}), uploads)

    def _take_over(self, owner: int, t: int, result: Aligned | str) -> Iterator[tuple[int, Message]]:
        if isinstance(result, str):
            self.skipped["pooled" if owner == POOLED else str(owner)] = result
            return
        self.aligned = True
        self._aligned_in[owner] = t
        if result.optimizer:
            self._optimizers[owner] = result.optimizer
        message = aligned_auxiliary(self._settings, owner, t, result.auxiliary, self.of(owner))
        # The S-server goes on with what the client has, not with what coding has lost of it.
        published = dict(message.parts[AUXILIARY])
        if owner == POOLED:
            self.common = published
        else:
            self._aligned[owner] = published
        receivers = range(self._settings.config.clients) if owner == POOLED else [owner]
        yield from ((receiver, message) for receiver in receivers)

    # Fidelity

    def drifted(self, least: float, every: int, t: int, server: Tensors) -> list[int]:
        """The clients whose auxiliaries estimate worse than `least`, and were not aligned in the last rounds."""
        if self._pooled:
            found = self.fidelity(t, server) if self._may_align(POOLED, every, t) else None
            return sorted(self.data) if found is not None and found.cosine < least else []
        clients = [client for client in sorted(self.data) if client not in self._seen]
        clients = [client for client in clients if self._may_align(client, every, t)]
        found_by_client = zip(clients, self.fidelities(clients, server), strict=True)
        return [client for client, found in found_by_client if found is not None and found.cosine < least]

    def _may_align(self, owner: int, every: int, t: int) -> bool:
        return owner not in self._aligned_in or t - self._aligned_in[owner] >= every

    def fidelity(self, t: int, server: Tensors, *, seen: bool = False) -> Fidelity | None:
        """The mean over a few clients, drawn from those whose newest upload an alignment has seen, or has not."""
        clients = [client for client in sorted(self.data) if (client in self._seen) == seen]
        draw = numpy_generator(self._settings.config.seed, "fidelity", round=t)
        drawn = sorted(draw.permutation(clients)[:CLIENTS].tolist())
        return mean(self.fidelities(drawn, server)) if drawn else None

    def fidelities(self, clients: Sequence[int], server: Tensors) -> list[Fidelity | None]:
        """Of the auxiliaries of these clients, each on the last samples of its newest upload."""
        items = [(self.of(client), self.data[client].newest().last(SAMPLES)) for client in clients]
        return self._spread(fidelity_one, server, items) if items else []

    # Checkpoints

    def state(self) -> Tensors:
        """A flat dict for a checkpoint; between rounds."""
        state = flat({"auxiliary": self.common})
        state["seen"] = torch.tensor(sorted(self._seen), dtype=torch.int64)
        if self._aligned_in:
            state["aligned_in"] = torch.tensor(sorted(self._aligned_in.items()), dtype=torch.int64)
        groups: dict[str, Mapping[int, Tensors]] = {
            "aligned": self._aligned,
            "alignment_optimizers": self._optimizers,
            "alignment": {client: data.state() for client, data in self.data.items()},
            "sums": {owner: sums.state() for owner, sums in self._sums.items()},
        }
        if self._uploads:
            state["uploads"] = torch.tensor(self._uploads)
        for group, own in groups.items():
            state |= flat({str(client): tensors for client, tensors in own.items()}, f"{group}/")
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.common = below("auxiliary/", state)
        self._aligned = by_client(below("aligned/", state))
        self._optimizers = by_client(below("alignment_optimizers/", state))
        self._seen = set(state["seen"].tolist())
        self._aligned_in = dict(state["aligned_in"].tolist()) if "aligned_in" in state else {}
        for client, tensors in by_client(below("alignment/", state)).items():
            self.data[client] = AlignmentData(self._capacity())
            self.data[client].load_state(tensors)
        self._sums = {owner: Sums(**own) for owner, own in by_client(below("sums/", state)).items()}
        self._uploads = int(state["uploads"]) if "uploads" in state else 0
        self._room = self._common_room()


def aligned_auxiliary(settings: Settings, client: int, t: int, aligned: Tensors, held: Tensors) -> Message:
    """The message of an auxiliary to those who have the one before it: as they decode it, and what is sent."""
    change = settings.codecs.published.get(AUXILIARY)
    if change is None:
        return Message({AUXILIARY: aligned})
    noise = settings.codecs.noise(AUXILIARY, client, t)
    sent = change.encode(aligned, held, {}, settings.trained["auxiliary"], noise)
    return Message({AUXILIARY: sent.decoded}, changes={AUXILIARY: sent.arrays})
